"""Tiny architectures of transformers, with random weights.

They are in training mode, have labels in the batch, and return their own loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tests.coverage.case import ROWS, Batch, Family, make_job
from torch import Tensor, nn

from trainload.capture.job.definition import Job

FAMILY = Family("transformers")
VOCABULARY = 96
TIME = 9
Sizes = dict[str, Any]
TEXT: Sizes = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 40,
}  # fmt: skip
GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE: Sizes = {
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
} | {
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
LABELS = {"num_labels": 5}
EXPERTS = {"experts_implementation": "batched_mm"}
"""Option that computes experts with torch's own operators."""


def tokens(low: int = 3) -> Tensor:
    """Return (rows, TIME) token ids that are not special."""
    return torch.randint(low, VOCABULARY, (ROWS, TIME))


def causal() -> Batch:
    """Return token ids, and labels of which the first ones are ignored."""
    ids = tokens()
    labels = ids.clone()
    labels[:, :2] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def unmasked() -> Batch:
    """Return the batch of `causal` without a mask."""
    return {name: value for name, value in causal().items() if name != "attention_mask"}


def masked() -> Batch:
    """Return a batch for masked language modeling with padding.

    All rows have the same number of labels, so that they have the same weight.
    """
    ids = tokens()
    ids[:, -2:] = 0
    labels = torch.full_like(ids, -100)
    labels[:, 1:4] = tokens()[:, 1:4]
    return {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}


def translated() -> Batch:
    """Return source tokens and target labels."""
    return {
        "input_ids": tokens(),
        "attention_mask": torch.ones(ROWS, TIME, dtype=torch.long),
        "labels": tokens()[:, :6],
    }


def image(size: int = 32) -> Callable[[], Batch]:
    """Return a function that makes images with one class each."""
    return lambda: {
        "pixel_values": torch.randn(ROWS, 3, size, size),
        "labels": torch.tensor([0, 1, 2, 3]),
    }


def model_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the model's own loss."""
    loss: Tensor = model(**batch).loss
    return loss


def add(
    name: str,
    head: str,
    sizes: Mapping[str, Any],
    batch: Callable[[], Batch],
    *,
    nested: Callable[[Any], Mapping[str, Any]] | None = None,
    refused: str = "",
    gap: str = "",
    mixes_rows: bool = False,
    loss: Callable[[nn.Module, Batch], Any] = model_loss,
) -> None:
    """Register a case.

    Args:
        name: name of the architecture.
        head: the class in transformers.
        sizes: its configuration.
        batch: makes the example.
        nested: makes additional configuration from the transformers module.
        refused: as in `Case`.
        gap: as in `Case`.
        mixes_rows: as in `Case`.
        loss: default: the model's own.
    """

    def build() -> Job:
        import transformers

        kind = getattr(transformers, head)
        more = nested(transformers) if nested is not None else {}
        config = kind.config_class(**{"use_cache": False, **sizes, **more})
        return make_job(kind(config), batch(), loss)

    build.__doc__ = head
    FAMILY.add(name, refused=refused, gap=gap, mixes_rows=mixes_rows)(build)


GPT2: Sizes = {
    "vocab_size": VOCABULARY,
    "n_positions": 40,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 4,
} | SPECIAL

add("gpt2", "GPT2LMHeadModel", GPT2, causal)
add(
    "llama",
    "LlamaForCausalLM",
    GROUPED | SPECIAL | {"tie_word_embeddings": True, "attention_dropout": 0.1},
    causal,
)
add("bert", "BertForMaskedLM", TEXT, masked)
add(
    "t5",
    "T5ForConditionalGeneration",
    {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 1,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
    translated,
)
add("vit", "ViTForImageClassification", IMAGE | LABELS | {"hidden_dropout_prob": 0.1}, image())
add(
    "resnet",
    "ResNetForImageClassification",
    {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    | LABELS,
    image(),
    mixes_rows=True,
)
add(
    "convnext",
    "ConvNextForImageClassification",
    {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.2} | LABELS,
    image(),
)
add(
    "mixtral",
    "MixtralForCausalLM",
    GROUPED | SPECIAL | EXPERTS | {"num_local_experts": 4, "output_router_logits": True},
    causal,
    mixes_rows=True,
)
add(
    "mixtral, grouped products",
    "MixtralForCausalLM",
    GROUPED | SPECIAL | {"num_local_experts": 4},
    causal,
    gap="transformers' default for experts is a custom operator: the package can be opened only where transformers is, and is trusted",
)
add(
    "whisper",
    "WhisperForConditionalGeneration",
    {
        "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 16,
        "max_target_positions": 20, "decoder_start_token_id": 1, "dropout": 0.1,
    } | SPECIAL,
    lambda: {"input_features": torch.randn(ROWS, 8, 32), "labels": tokens()},
)  # fmt: skip
add(
    "mamba",
    "MambaForCausalLM",
    {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1}
    | SPECIAL,
    unmasked,
)

# Language models.
add("mistral", "MistralForCausalLM", GROUPED | SPECIAL | {"sliding_window": 4}, causal)
add(
    "qwen2",
    "Qwen2ForCausalLM",
    {k: v for k, v in GROUPED.items() if k != "head_dim"} | SPECIAL,
    causal,
)
add("qwen3", "Qwen3ForCausalLM", GROUPED | SPECIAL, causal)
add(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    GROUPED
    | SPECIAL
    | EXPERTS
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    causal,
)
add("gemma", "GemmaForCausalLM", GROUPED | SPECIAL, causal)
add(
    "gemma2",
    "Gemma2ForCausalLM",
    GROUPED | SPECIAL | {"num_hidden_layers": 2, "sliding_window": 4},
    causal,
)
add("gemma3", "Gemma3ForCausalLM", GROUPED | SPECIAL | {"sliding_window": 4}, causal)
add("phi", "PhiForCausalLM", TEXT | SPECIAL, causal)
add("phi3", "Phi3ForCausalLM", TEXT | SPECIAL, causal)
add(
    "falcon",
    "FalconForCausalLM",
    {k: v for k, v in TEXT.items() if k != "intermediate_size"} | SPECIAL | {"hidden_dropout": 0.1},
    causal,
)
add(
    "bloom",
    "BloomForCausalLM",
    {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 1, "n_head": 4} | SPECIAL,
    causal,
)
add("opt", "OPTForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 40, "word_embed_proj_dim": 32} | SPECIAL, causal)  # fmt: skip
add("gpt_neox", "GPTNeoXForCausalLM", TEXT | SPECIAL | {"hidden_dropout": 0.1}, causal)
add("gpt_neo", "GPTNeoForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4,
    "max_position_embeddings": 40, "attention_types": [[["global", "local"], 1]]} | SPECIAL, causal)  # fmt: skip
add("gptj", "GPTJForCausalLM", GPT2 | {"rotary_dim": 4}, causal)
add("gpt_bigcode", "GPTBigCodeForCausalLM", GPT2, causal)
add("codegen", "CodeGenForCausalLM", GPT2 | {"rotary_dim": 4}, causal)
add("olmo", "OlmoForCausalLM", TEXT | SPECIAL, causal)
add("olmo2", "Olmo2ForCausalLM", TEXT | SPECIAL, causal)
add("stablelm", "StableLmForCausalLM", TEXT | SPECIAL | {"num_key_value_heads": 4}, causal)
add(
    "starcoder2",
    "Starcoder2ForCausalLM",
    TEXT | SPECIAL | {"num_key_value_heads": 2, "residual_dropout": 0.1},
    causal,
)
add("granite", "GraniteForCausalLM", TEXT | SPECIAL, causal)
add("cohere", "CohereForCausalLM", TEXT | SPECIAL, causal)
add(
    "mpt",
    "MptForCausalLM",
    {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 40},
    causal,
)
add("mamba2", "Mamba2ForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1, "num_heads": 8,
    "head_dim": 8, "n_groups": 2, "chunk_size": 4} | SPECIAL, unmasked)  # fmt: skip
add(
    "rwkv",
    "RwkvForCausalLM",
    {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 40}
    | SPECIAL,
    unmasked,
    refused="in evaluation it divides its own parameters in place, and multiplies them again for training",
)
add("jamba", "JambaForCausalLM", {k: v for k, v in TEXT.items() if k != "max_position_embeddings"} | SPECIAL | {"num_hidden_layers": 2,
    "num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "num_experts": 2, "mamba_d_state": 4, "use_mamba_kernels": False} | EXPERTS, causal)  # fmt: skip
add("deepseek_v3", "DeepseekV3ForCausalLM", TEXT | SPECIAL | {"num_hidden_layers": 2, "num_key_value_heads": 4,
    "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1} | EXPERTS, causal)  # fmt: skip
add("gpt_oss", "GptOssForCausalLM", GROUPED | SPECIAL | EXPERTS
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "num_hidden_layers": 2}, causal)  # fmt: skip
add("olmoe", "OlmoeForCausalLM", {k: v for k, v in GROUPED.items() if k != "head_dim"} | SPECIAL | EXPERTS
    | {"num_experts": 4, "num_experts_per_tok": 2}, causal)  # fmt: skip
add(
    "smollm3",
    "SmolLM3ForCausalLM",
    {k: v for k, v in GROUPED.items() if k != "head_dim"} | SPECIAL,
    causal,
)
add("glm4", "Glm4ForCausalLM", GROUPED | SPECIAL, causal)
add(
    "llama, eager attention",
    "LlamaForCausalLM",
    GROUPED | SPECIAL | {"attn_implementation": "eager", "attention_dropout": 0.1},
    causal,
)
add("switch_transformers", "SwitchTransformersForConditionalGeneration", {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48,
    "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "decoder_start_token_id": 0, "num_experts": 4, "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1, "expert_capacity": 8}, translated, mixes_rows=True,
    refused="it loops over the experts that the batch's tokens chose")  # fmt: skip
add(
    "xlnet",
    "XLNetLMHeadModel",
    {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 48} | SPECIAL,
    unmasked,
)
add("dbrx", "DbrxForCausalLM", {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 40,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}} | SPECIAL, causal,
    refused="it loops over the experts that the batch's tokens chose")  # fmt: skip
add("xglm", "XGLMForCausalLM", {"vocab_size": VOCABULARY, "d_model": 32, "ffn_dim": 48, "num_layers": 1, "attention_heads": 4,
    "max_position_embeddings": 40} | SPECIAL, causal)  # fmt: skip

# Encoders.
add("roberta", "RobertaForMaskedLM", TEXT | SPECIAL, masked)
add(
    "deberta_v2",
    "DebertaV2ForMaskedLM",
    TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    masked,
)
add("distilbert", "DistilBertForMaskedLM", {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 1, "n_heads": 4,
    "max_position_embeddings": 40}, masked)  # fmt: skip
add("electra", "ElectraForMaskedLM", TEXT | {"embedding_size": 16}, masked)
add(
    "albert", "AlbertForMaskedLM", TEXT | {"embedding_size": 16, "hidden_dropout_prob": 0.1}, masked
)
add("camembert", "CamembertForMaskedLM", TEXT | SPECIAL, masked)
add("mpnet", "MPNetForMaskedLM", TEXT | SPECIAL, masked)
add(
    "modernbert",
    "ModernBertForMaskedLM",
    TEXT | SPECIAL | {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 4},
    masked,
)
add("longformer", "LongformerForMaskedLM", TEXT | SPECIAL | {"attention_window": 4}, masked,
    refused="its attention asks the mask's values whether any token is global, and computes something else if so")  # fmt: skip
add("fnet", "FNetForMaskedLM", {k: v for k, v in TEXT.items() if k != "num_attention_heads"} | SPECIAL,
    lambda: {k: v for k, v in masked().items() if k != "attention_mask"})  # fmt: skip
add(
    "bert, classification",
    "BertForSequenceClassification",
    TEXT | LABELS,
    lambda: {
        "input_ids": tokens(),
        "attention_mask": torch.ones(ROWS, TIME, dtype=torch.long),
        "labels": torch.tensor([0, 1, 2, 3]),
    },
)
add("roberta, token classification", "RobertaForTokenClassification", TEXT | SPECIAL | LABELS,
    lambda: {"input_ids": tokens(), "labels": torch.randint(0, 5, (ROWS, TIME))})  # fmt: skip

add(
    "deberta",
    "DebertaForMaskedLM",
    TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    masked,
)
add("squeezebert", "SqueezeBertForMaskedLM", TEXT | SPECIAL | {"embedding_size": 32, "q_groups": 2, "k_groups": 2, "v_groups": 2,
    "post_attention_groups": 2, "intermediate_groups": 2, "output_groups": 2}, masked)  # fmt: skip
add("big_bird", "BigBirdForMaskedLM", TEXT | SPECIAL | {"attention_type": "original_full"}, masked)
add("bert, question answering", "BertForQuestionAnswering", TEXT,
    lambda: {"input_ids": tokens(), "start_positions": torch.arange(1, 5), "end_positions": torch.arange(2, 6)})  # fmt: skip
add("bert, several labels", "BertForSequenceClassification", TEXT | LABELS | {"problem_type": "multi_label_classification"},
    lambda: {"input_ids": tokens(), "labels": torch.rand(ROWS, 5).round()})  # fmt: skip

# Encoder and decoder.
SEQ2SEQ: Sizes = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 40, "decoder_start_token_id": 1,
} | SPECIAL  # fmt: skip
add("bart", "BartForConditionalGeneration", SEQ2SEQ, translated)
add("pegasus", "PegasusForConditionalGeneration", SEQ2SEQ, translated)
add("mbart", "MBartForConditionalGeneration", SEQ2SEQ, translated)
add("marian", "MarianMTModel", SEQ2SEQ | {"decoder_start_token_id": 0}, translated)
add(
    "m2m_100",
    "M2M100ForConditionalGeneration",
    SEQ2SEQ | {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    translated,
)
add("blenderbot", "BlenderbotForConditionalGeneration", SEQ2SEQ, translated)

# Images.
add("deit", "DeiTForImageClassification", IMAGE | LABELS, image())
add("swin", "SwinForImageClassification", {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
    "window_size": 4} | LABELS, image())  # fmt: skip
add("swinv2", "Swinv2ForImageClassification", {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
    "window_size": 4} | LABELS, image())  # fmt: skip
add("beit", "BeitForImageClassification", IMAGE | LABELS, image())
add(
    "dinov2",
    "Dinov2ForImageClassification",
    {k: v for k, v in IMAGE.items() if k != "intermediate_size"} | LABELS,
    image(),
)
add("segformer", "SegformerForImageClassification", {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
    "hidden_sizes": [8, 16],
    "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]} | LABELS, image())  # fmt: skip
add(
    "mobilenet_v2",
    "MobileNetV2ForImageClassification",
    {"image_size": 32, "depth_multiplier": 0.35} | LABELS,
    image(),
    mixes_rows=True,
)
add("regnet", "RegNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8} | LABELS,
    image(), mixes_rows=True)  # fmt: skip
add(
    "convnextv2",
    "ConvNextV2ForImageClassification",
    {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2} | LABELS,
    image(),
)
add("vit_mae", "ViTMAEForPreTraining", IMAGE | {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 16}, lambda: {"pixel_values": torch.randn(ROWS, 3, 32, 32)})  # fmt: skip

# Text with images.
_CLIP_TEXT = TEXT | SPECIAL


def _both(kind: str) -> Callable[[Any], Mapping[str, Any]]:
    return lambda t: {
        "text_config": getattr(t, f"{kind}TextConfig")(**_CLIP_TEXT).to_dict(),
        "vision_config": getattr(t, f"{kind}VisionConfig")(**IMAGE).to_dict(),
    }


def _captioned() -> Batch:
    return {
        "input_ids": tokens(),
        "pixel_values": torch.randn(ROWS, 3, 32, 32),
        "attention_mask": torch.ones(ROWS, TIME, dtype=torch.long),
    }


def _pair_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


add(
    "clip",
    "CLIPModel",
    {"projection_dim": 16},
    _captioned,
    nested=_both("CLIP"),
    mixes_rows=True,
    loss=_pair_loss,
)
add(
    "siglip",
    "SiglipModel",
    {},
    _captioned,
    nested=_both("Siglip"),
    mixes_rows=True,
    loss=_pair_loss,
)

# Sound.
SOUND: Sizes = {
    "vocab_size": 12, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "conv_dim": [16, 16],
    "conv_stride": [4, 4], "conv_kernel": [8, 4], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "layerdrop": 0.0, "ctc_loss_reduction": "mean",
} | SPECIAL  # fmt: skip


def _classes(time: int = 320) -> Callable[[], Batch]:
    return lambda: {"input_values": torch.randn(ROWS, time), "labels": torch.tensor([0, 1, 2, 3])}


def _letters() -> Batch:
    return {"input_values": torch.randn(ROWS, 320), "labels": torch.randint(3, 12, (ROWS, 3))}


add("wav2vec2", "Wav2Vec2ForSequenceClassification", SOUND | LABELS, _classes())
add("hubert", "HubertForSequenceClassification", SOUND | LABELS, _classes())
add("wav2vec2, CTC", "Wav2Vec2ForCTC", SOUND, _letters,
    refused="it compares the labels' values with the size of its vocabulary in Python")  # fmt: skip
add(
    "wav2vec2 with layerdrop and time masks",
    "Wav2Vec2ForSequenceClassification",
    SOUND | LABELS | {"mask_time_prob": 0.3, "mask_time_length": 2, "layerdrop": 0.5},
    _classes(),
    refused="which layers are skipped and which times are masked is drawn by numpy and by Python branches, outside of the graph",
)
add("audio_spectrogram_transformer", "ASTForAudioClassification", {k: IMAGE[k] for k in IMAGE if k not in ("image_size", "num_channels")}
    | {"num_mel_bins": 16, "max_length": 32, "frequency_stride": 8, "time_stride": 8} | LABELS,
    lambda: {"input_values": torch.randn(ROWS, 32, 16), "labels": torch.tensor([0, 1, 2, 3])})  # fmt: skip
