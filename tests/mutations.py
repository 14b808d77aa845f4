"""Small breaks of the code, at least two for each law, and the test that must notice each. `python -m tests.mutate` tries them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """A bug that somebody could make.

    Attributes:
        law: the law that it breaks.
        name: what is wrong.
        file: relative to the repository's root.
        old: text that occurs exactly once in it.
        new: what stands there instead.
        test: a pytest node that must fail, one of its law's or, quicker, of its stage's ("../capture/..."); relative to tests/laws.
    """

    law: int
    name: str
    file: str
    old: str
    new: str
    test: str


_TWO = "test_law_3.py::test_two_workers_have_the_losses_of_one"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        1,
        "the wheel lacks a stage",
        "pyproject.toml",
        '    "trainload.sharding",\n',
        "",
        "test_law_1.py::test_the_package_trains_alone",
    ),
    Mutation(
        1,
        "a run without Ray needs Ray",
        "launch/worker.py",
        "from trainload.autograd_trace.aot import begun_collectives, bind_groups\n",
        "import ray  # noqa: F401\n\nfrom trainload.autograd_trace.aot import begun_collectives, bind_groups\n",
        "test_law_1.py::test_the_package_trains_alone",
    ),
    Mutation(
        1,
        "a run asks the network for a newer trainload",
        "launch/local_run.py",
        "        _work(spec, Place(0, 1, 1))\n",
        "        __import__('socket').create_connection(('pypi.org', 443), timeout=5).close()\n        _work(spec, Place(0, 1, 1))\n",
        "test_law_1.py::test_the_package_trains_alone",
    ),
    Mutation(
        2,
        "gradients are not compared at the freeze",
        "capture/parity.py",
        "for name, distance in distances.items() if not distance <= tolerance_for(expected[name], tolerance)}",
        "for name, distance in distances.items() if False}",
        "test_law_2.py::test_a_freeze_whose_graph_differs_is_refused_and_writes_nothing",
    ),
    Mutation(
        2,
        "the gradient is not that of the weighted loss",
        "autograd_trace/step_module.py",
        "loss * (weight * scalars[-1]).to(loss.dtype)",
        "loss * scalars[-1].to(loss.dtype)",
        "test_law_2.py::test_the_step_graph_has_eager_s_loss_gradients_and_buffers",
    ),
    Mutation(
        2,
        "a tied weight is another parameter",
        "packaging/read.py",
        "state[entry.name] = state[entry.alias_of]",
        "state[entry.name] = state[entry.alias_of].clone()",
        "test_law_2.py::test_the_package_s_graph_has_eager_s_loss_and_gradients_with_dropout",
    ),
    Mutation(
        2,
        "two hooks on one tensor act in the other order",
        "capture/regions.py",
        "for hook in [n for n in reversed(graph.nodes) if n.target is marks.HOOK]:",
        "for hook in [n for n in graph.nodes if n.target is marks.HOOK]:",
        "../capture/test_gradient_forms.py::test_a_form_is_captured_and_derived[hooked twice]",
    ),
    Mutation(
        2,
        "hooks on saved tensors may change them",
        "capture/saved_tensors.py",
        "        _demand_same(kept[1], result, page)\n",
        "",
        "../capture/test_gradient_forms.py::test_what_has_no_sound_form_is_refused[rounded-give backward other values than forward saved]",
    ),
    Mutation(
        2,
        "an optimizer's state is not compared between parameters",
        "autograd_trace/update_check.py",
        "if not differs and torch.allclose(together[i]",
        "if torch.allclose(together[i]",
        "../autograd_trace/test_optimizer_state.py::test_what_an_update_cannot_keep_is_refused[Estimated-depends on other parameters]",
    ),
    Mutation(
        2,
        "a number of an optimizer's is changed in place",
        "autograd_trace/python_numbers.py",
        "apart = _IN_PLACE.get(func) if args and _is_number(args[0]) else None",
        "apart = None",
        "../autograd_trace/test_optimizer_state.py::test_state_of_any_form_runs_on_slices[numbers that never change]",
    ),
    Mutation(
        2,
        "a wrapped optimizer keeps the model's parameters",
        "autograd_trace/bound_optimizer.py",
        "        made_of[id(inner)] = _copied(inner, made_of)\n",
        "",
        "../autograd_trace/test_optimizer_state.py::test_state_of_any_form_runs_on_slices[an optimizer in another]",
    ),
    Mutation(
        2,
        "len fixes the number of rows",
        "capture/lengths.py",
        "value.shape[0] if isinstance(value, Tensor) and value.ndim else builtins.len(value)",
        "builtins.len(value)",
        "../capture/test_lengths.py::test_len_of_a_batch_is_right_on_every_number_of_rows",
    ),
    Mutation(
        2,
        "the gradient of the CTC loss does not ask for the gradient of its result",
        "capture/ctc.py",
        "return by_loss.unsqueeze(-1) * gradient,",
        "return gradient,",
        "../capture/test_ctc.py::test_values_and_gradients_are_torchs",
    ),
    Mutation(
        2,
        "a variant takes batches that break its conditions",
        "capture/dispatch.py",
        "        if not self._derived and not self._conditions:\n",
        "        if not self._derived:\n",
        "../capture/test_dispatch.py::test_a_condition_is_asked_again_after_it_was_remembered",
    ),
    Mutation(
        2,
        "a size that two inputs share may differ between them",
        "capture/dispatch.py",
        "if bound[slot] >= 0 or not least <= size <= most:",
        "if not least <= size <= most:",
        "../capture/test_dispatch.py::test_a_symbol_has_one_value",
    ),
    Mutation(
        2,
        "a flag is the number 1",
        "capture/guards.py",
        '        return FixedValue("bool", str(value))\n',
        '        return FixedValue("int", str(int(value)))\n',
        "../capture/test_dispatch.py::test_a_constant_of_another_kind_or_value_does_not_fit",
    ),
    Mutation(
        2,
        "what a policy saves is computed again all the same",
        "autograd_trace/remat.py",
        "        while depth and own[depth - 1] in self._kept.get(node, ()):\n            depth -= 1\n",
        "",
        "../autograd_trace/test_remat.py::test_what_a_policy_saves_is_kept",
    ),
    Mutation(
        3,
        "dropout does not see which row of the global batch it is given",
        "autograd_trace/random.py",
        "                coordinate = coordinate + self.row * entries\n",
        "                pass\n",
        f"{_TWO}[zero0]",
    ),
    Mutation(
        3,
        "rows of stacked views are numbered by their places in the stack",
        "autograd_trace/random.py",
        "                if self.stacks > 1:\n",
        "                if False:\n",
        "../autograd_trace/test_derive.py::test_a_split_batch_gives_the_gradients_of_the_whole[two stacked views]",
    ),
    Mutation(
        3,
        "gradients are divided by the last microbatch's weight",
        "launch/engine.py",
        "        return sum(others, first), gradients\n",
        "        return [first, *others][-1], gradients\n",
        f"{_TWO}[zero0, microbatches, one bucket]",
    ),
    Mutation(
        3,
        "gradients are averaged over ranks where they should be summed",
        "sharding/rewrite.py",
        'reduce_scatter_tensor.default, flat, "sum"',
        'reduce_scatter_tensor.default, flat, "avg"',
        "test_law_3.py::test_two_workers_have_the_gradients_of_one[zero3]",
    ),
    Mutation(
        3,
        "every rank of a tensor axis adds the bias to its term of a sum",
        "sharding/tensor/partition.py",
        "return self.emit.only_first(made) if contracted[0] and source in use.once else made",
        "return made",
        f"{_TWO}[tensor]",
    ),
    Mutation(
        3,
        "each rank of a tensor axis looks up the first rows of the vocabulary",
        "sharding/tensor/place.py",
        "return self.call(aten.mul.Tensor, self.rank, length)",
        "return self.call(aten.mul.Tensor, self.rank, 0)",
        f"{_TWO}[tensor]",
    ),
    Mutation(
        3,
        "the queries of every rank of a context stand where the first rank's do",
        "sharding/tensor/attention.py",
        "device=device), emit.offset(own))",
        "device=device), 0)",
        "test_law_3.py::test_two_workers_have_the_losses_of_one[context]",
    ),
    Mutation(
        3,
        "each rank of a context divides its losses by the weight of its own positions",
        "sharding/tensor/special.py",
        "    weight = emit.reduced(own)\n",
        "    weight = own\n",
        "../sharding/tensor/test_positions.py::test_ranks_compute_what_one_would[masked, context-0]",
    ),
    Mutation(
        3,
        "what is gathered of positions for forward is kept for backward",
        "sharding/tensor/partition.py",
        "            del self._values[node][Held.WHOLE]\n",
        "            pass\n",
        "../sharding/tensor/test_positions.py::test_sequence_parallel_scatters_sums_where_the_tensor_axis_reduces_them",
    ),
    Mutation(
        3,
        "ranks are not asked whether they have one graph",
        "sharding/rank_graphs.py",
        "alike = [group for group in (DATA, TENSOR) if group in groups]",
        "alike = []",
        "../sharding/test_collectives.py::test_a_fault_in_one_rank_is_found[exchange-0]",
    ),
    Mutation(
        3,
        "a norm has one rank's share of the gradients that a tensor axis divides",
        "sharding/update.py",
        "square = square + _total(found[True], TENSOR)",
        "square = square + found[True]",
        "test_law_3.py::test_two_workers_have_the_gradients_of_one[tensor]",
    ),
    Mutation(
        3,
        "each rank clips by the norm of its own shard",
        "sharding/update.py",
        "if self._plan.shards_state and self._plan.shard_degree > 1:",
        "if self._plan.shards_gradients and self._plan.shard_degree > 1:",
        f"{_TWO}[zero1]",
    ),
    Mutation(
        3,
        "ZeRO-1 does not gather what the other ranks have updated",
        "launch/engine.py",
        "held.params[part.bucket.name] = self._whole_stored(part.bucket, self._updated_slice(part.bucket))",
        "self._whole_stored(part.bucket, self._updated_slice(part.bucket))",
        f"{_TWO}[zero1]",
    ),
    Mutation(
        4,
        "the optimizer's count of steps begins anew",
        "launch/rank_state.py",
        "kinds[kind][bucket][entry].to(self._device) for",
        "kinds[kind][bucket][entry].to(self._device) * (kind is not StateKind.SCALAR) for",
        "test_law_4.py::test_a_killed_run_resumes[1-single-2-zero1]",
    ),
    Mutation(
        4,
        "a resumed run begins with the first rows again",
        "launch/worker.py",
        "with BatchStream(self._data, rows, self._start, spec.steps,",
        "with BatchStream(self._data, rows, 0, spec.steps,",
        "test_law_4.py::test_a_killed_run_resumes[1-single-2-zero1]",
    ),
    Mutation(
        4,
        "dropout and the schedule begin anew",
        "launch/worker.py",
        "result = self._engine.step(step, draws",
        "result = self._engine.step(step - self._start, draws",
        "test_law_4.py::test_a_killed_run_resumes[1-single-2-zero1]",
    ),
    Mutation(
        4,
        "another number of workers finds its shard in the wrong place",
        "launch/checkpoints/load.py",
        "first - slot.offset, flat[first - start : last - start])",
        "first - slot.offset, flat[: last - first])",
        "test_law_4.py::test_a_killed_run_resumes[2-zero3-1-single]",
    ),
    Mutation(
        4,
        "a turn that begins late is counted from the first round",
        "autograd_trace/rounds.py",
        "return round_number >= turn.start and (round_number - turn.start) % turn.every == 0",
        "return round_number >= turn.start and round_number % turn.every == 0",
        "../autograd_trace/test_rounds.py::test_turns_before_a_round_are_those_that_the_rounds_before_it_called",
    ),
    Mutation(
        4,
        "a resumed loop forgets the batches that turns shared",
        "autograd_trace/rounds.py",
        "return own + (round_number if _shares(recipe) else 0)",
        "return own",
        "../autograd_trace/test_rounds.py::test_a_round_draws_what_its_turns_read",
    ),
    Mutation(
        5,
        "source paths are part of the identity",
        "packaging/manifest.py",
        'OUTSIDE = ("debug", "derived", "signatures")',
        'OUTSIDE = ("derived", "signatures")',
        "test_law_5.py::test_two_processes_in_two_folders_write_the_same_bytes",
    ),
    Mutation(
        5,
        "a set's order reaches the manifest",
        "packaging/write.py",
        "higher_order_ops=tuple(sorted(frozenset[str]().union(*(fact.higher_order for fact in facts)))),",
        "higher_order_ops=tuple(frozenset[str]().union(*(fact.higher_order for fact in facts))),",
        "test_law_5.py::test_two_processes_in_two_folders_write_the_same_bytes",
    ),
    Mutation(
        5,
        "files are known by their size",
        "packaging/files.py",
        "    if (size, digest) != (entry.size, entry.sha256):\n",
        "    if size != entry.size:\n",
        "test_law_5.py::test_a_flipped_bit_in_an_asset_is_found",
    ),
    Mutation(
        5,
        "weights are read unchecked",
        "packaging/chunks.py",
        "if hashlib.sha256(block).hexdigest() != self._digests[number]:",
        "if len(block) == 0:",
        "test_law_5.py::test_a_run_does_not_train_on_weights_with_a_flipped_bit",
    ),
    Mutation(
        5,
        "shards of checkpoints are known by their size",
        "packaging/chunks.py",
        "if hashlib.sha256(block).hexdigest() != self._digests[number]:",
        "if len(block) == 0:",
        "test_law_5.py::test_a_flipped_bit_in_any_file_of_a_checkpoint_is_found",
    ),
    Mutation(
        6,
        "symbolic sizes go to sympy as they are",
        "packaging/validate.py",
        '        check_expression(value, f"{self.file}, {self.at}")\n',
        "",
        "test_law_6.py::test_a_hostile_package_is_refused_and_nothing_runs[symbolic_size]",
    ),
    Mutation(
        6,
        "a worker does not ask its own machine's policy",
        "launch/libraries.py",
        "    held = tuple(dict.fromkeys((*policies, *find_policies())))\n",
        "    held = tuple(policies)\n",
        "../launch/test_policy_runs.py::test_a_worker_holds_the_package_to_its_own_machine_s_policy",
    ),
    Mutation(
        6,
        "an unsigned package is launched though a policy demands a signature",
        "packaging/signatures/policy.py",
        "        if count < policy.signatures:\n",
        "        if held and count < policy.signatures:\n",
        "../launch/test_policy_runs.py::test_an_unsigned_package_is_not_launched[launch]",
    ),
    Mutation(
        6,
        "a signature of another key will do",
        "packaging/signatures/vouching.py",
        '    if identity.kind == "key" and signature.signer != identity.fingerprint:\n',
        "    if False:\n",
        "../packaging/test_signing.py::test_another_key_s_signature_is_a_problem_that_names_both_keys",
    ),
    Mutation(
        6,
        "a graph may make files",
        "packaging/operators.py",
        '{"from_file", "_print", ',
        '{"_print", ',
        "test_law_6.py::test_a_hostile_package_is_refused_and_nothing_runs[operator_that_writes_files]",
    ),
    Mutation(
        6,
        "unknown fields of a graph are let through",
        "packaging/validate.py",
        "                if key not in fields:\n"
        '                    self.refuse("a field that graph files do not have", key)\n'
        "                fields[key](entry)\n",
        "                if key in fields:\n                    fields[key](entry)\n",
        "test_law_6.py::test_a_hostile_package_is_refused_and_nothing_runs[guards]",
    ),
    Mutation(
        6,
        "wheels in a package are loaded without a word",
        "launch/extensions.py",
        'return "the user or a policy said so" if trusted else None',
        'return "the user said so"',
        "../launch/test_extensions.py::test_without_the_word_nothing_of_the_wheel_runs",
    ),
    Mutation(
        6,
        "a wheel may write outside of its folder",
        "packaging/wheels.py",
        'if not plain or any(part in ("", ".", "..") for part in parts):',
        "if not plain:",
        "../packaging/test_wheels.py::test_a_wheel_with_a_path_that_leaves_its_folder_is_refused",
    ),
    Mutation(
        3,
        "stages that share a parameter keep their own gradients of it",
        "sharding/update.py",
        "        return _total(gradient, shared_group(holders)) if len(holders) > 1 else gradient\n",
        "        return gradient\n",
        "test_law_3.py::test_two_workers_have_the_losses_of_one[1f1b]",
    ),
    Mutation(
        3,
        "the norm counts what stages share once for each of them",
        "sharding/update.py",
        "            if self._plan.holders(part.bucket)[0] == self._index:",
        "            if self._plan.holders(part.bucket):",
        "test_law_3.py::test_two_workers_have_the_gradients_of_one[1f1b]",
    ),
    Mutation(
        3,
        "a stage's totals are those of its last microbatch",
        "launch/pipeline.py",
        "                        totals = own if totals is None else totals + own\n",
        "                        totals = own\n",
        "test_law_3.py::test_two_workers_have_the_losses_of_one[1f1b]",
    ),
    Mutation(
        3,
        "every rank of a pipeline writes its own buffers' old values",
        "launch/checkpoints/writer.py",
        "        return {} if pipeline is None else {name: pipeline.stage_ranks[stage] for name, stage in pipeline.buffers.items()}\n",
        "        return {}\n",
        "../launch/test_checkpoint_reading.py::test_a_checkpoint_of_any_plan_is_read_under_any_other[two stages-single]",
    ),
    Mutation(
        7,
        "a package is renamed before its files are written",
        "packaging/files.py",
        "        yield folder\n"
        "        folder.chmod(0o755)\n"
        "        for inner, _, _ in os.walk(folder):\n"
        "            sync_folder(Path(inner))\n"
        "        _put(folder, Path(path))\n",
        "        folder.rename(path)\n"
        "        folder = Path(path)\n"
        "        yield folder\n"
        "        folder.chmod(0o755)\n"
        "        for inner, _, _ in os.walk(folder):\n"
        "            sync_folder(Path(inner))\n",
        "test_law_7.py::test_packages_are_visible_whole_or_not_at_all",
    ),
    Mutation(
        7,
        "the index of a checkpoint is written after it was published",
        "launch/checkpoints/writer.py",
        "            _write_durably(draft / INDEX, encode_index(index))\n"
        "            sync_folder(draft)\n"
        "            self._before_publishing()\n"
        "            self._publish(draft, self._folder / folder_name(index.step))\n",
        "            self._publish(draft, self._folder / folder_name(index.step))\n"
        "            _write_durably(self._folder / folder_name(index.step) / INDEX, encode_index(index))\n",
        "test_law_7.py::test_checkpoints_runs_and_results_are_visible_whole_or_not_at_all",
    ),
    Mutation(
        5,
        "a pulled file is taken though its digest is another one",
        "packaging/stores/pull.py",
        "    if size != entry.size or digest.hexdigest() != entry.sha256:\n        raise _damaged(file",
        "    if size != entry.size:\n        raise _damaged(file",
        "../packaging/test_stores_hostile.py::test_a_bit_that_flipped_in_the_store_is_noticed[folder]",
    ),
    Mutation(
        7,
        "a second writer takes the number of the first",
        "packaging/stores/folder.py",
        "                os.link(draft, target)\n            except FileExistsError:",
        "                draft.replace(target)\n            except FileExistsError:",
        "../packaging/test_stores_writers.py::test_processes_that_write_at_once_lose_nothing[folder]",
    ),
    Mutation(
        7,
        "a release appears before its files",
        "packaging/stores/push.py",
        "        sent = _send(target, local, lease, on_progress)\n        lease.demand()\n",
        "        target.publish(name, local.manifest, local.digest, local.files)\n"
        "        sent = _send(target, local, lease, on_progress)\n        lease.demand()\n",
        "../packaging/test_stores_writers.py::test_a_push_that_is_killed_anywhere_shows_a_whole_release_or_none_and_goes_on",
    ),
    Mutation(
        7,
        "gc does not look what pushes rely on",
        "packaging/stores/collect.py",
        "    needed = {digest for path in live for digest in pushes[path].blobs}\n",
        "    needed = set[str]()\n",
        "../packaging/test_stores_gc.py::test_the_blobs_of_a_push_that_was_just_broken_off_wait_for_it[folder]",
    ),
)
