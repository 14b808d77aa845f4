"""Breaks of stored data: packages, releases, checkpoints, ticks. Laws 5 to 7."""

from __future__ import annotations

from tests.breaks.mutation import Mutation

KEEPING: tuple[Mutation, ...] = (
    Mutation(
        5,
        "source paths are part of the identity",
        "packaging/format/package_paths.py",
        'OUTSIDE = ("debug", "derived", SIGNATURES)',
        'OUTSIDE = ("derived", SIGNATURES)',
        "test_law_5.py::test_two_processes_in_two_folders_write_the_same_bytes",
    ),
    Mutation(
        5,
        "a set's order reaches the manifest",
        "packaging/write.py",
        "                sorted(frozenset[str]().union(*(fact.higher_order for fact in facts)))\n",
        "                frozenset[str]().union(*(fact.higher_order for fact in facts))\n",
        "test_law_5.py::test_two_processes_in_two_folders_write_the_same_bytes",
    ),
    Mutation(
        5,
        "files are known by their size",
        "packaging/format/package_files.py",
        "    if (size, digest) != (entry.size, entry.sha256):\n",
        "    if size != entry.size:\n",
        "test_law_5.py::test_a_flipped_bit_in_an_asset_is_found",
    ),
    Mutation(
        5,
        "weights are read unchecked",
        "packaging/tensors/chunks.py",
        "if hashlib.sha256(block).hexdigest() != self._digests[number]:",
        "if len(block) == 0:",
        "test_law_5.py::test_a_run_does_not_train_on_weights_with_a_flipped_bit",
    ),
    Mutation(
        5,
        "shards of checkpoints are known by their size",
        "packaging/tensors/chunks.py",
        "if hashlib.sha256(block).hexdigest() != self._digests[number]:",
        "if len(block) == 0:",
        "test_law_5.py::test_a_flipped_bit_in_any_file_of_a_checkpoint_is_found",
    ),
    Mutation(
        6,
        "symbolic sizes go to sympy as they are",
        "packaging/graphs/validate.py",
        '        check_expression(value, f"{self.file}, {self.at}")\n',
        "",
        "test_law_6.py::test_a_hostile_package_is_refused_and_nothing_runs[symbolic_size]",
    ),
    Mutation(
        6,
        "a worker does not ask its own machine's policy",
        "launch/node/libraries.py",
        "    all_policies = tuple(dict.fromkeys((*policies, *find_policies())))\n",
        "    all_policies = tuple(policies)\n",
        "../launch/api/test_policy_runs.py::test_a_worker_holds_the_package_to_its_own_machine_s_policy",
    ),
    Mutation(
        6,
        "an unsigned package is launched though a policy demands a signature",
        "packaging/signatures/policy.py",
        "        if count < policy.signatures:\n",
        "        if signed and count < policy.signatures:\n",
        "../launch/api/test_policy_runs.py::test_an_unsigned_package_is_not_launched[launch]",
    ),
    Mutation(
        6,
        "a signature of another key will do",
        "packaging/signatures/vouching.py",
        '    if identity.kind == "key" and signature.signer != identity.fingerprint:\n',
        "    if False:\n",
        "../packaging/signatures/test_signing.py::test_another_key_s_signature_is_a_problem_that_names_both_keys",
    ),
    Mutation(
        6,
        "a graph may make files",
        "packaging/graphs/allowed_operators.py",
        '        "from_file",\n',
        "",
        "test_law_6.py::test_a_hostile_package_is_refused_and_nothing_runs[operator_that_writes_files]",
    ),
    Mutation(
        6,
        "unknown fields of a graph are let through",
        "packaging/graphs/validate.py",
        "                if key not in fields:\n"
        '                    self.refuse("unknown field", key)\n'
        "                fields[key](entry)\n",
        "                if key in fields:\n                    fields[key](entry)\n",
        "test_law_6.py::test_a_hostile_package_is_refused_and_nothing_runs[guards]",
    ),
    Mutation(
        6,
        "wheels in a package are loaded without a word",
        "launch/node/extensions.py",
        'return "the user or a policy said so" if trusted else None',
        'return "the user said so"',
        "../launch/node/test_extensions.py::test_without_the_word_nothing_of_the_wheel_runs",
    ),
    Mutation(
        6,
        "a wheel may write outside of its folder",
        "packaging/libraries/wheels.py",
        'if not plain or any(part in ("", ".", "..") for part in parts):',
        "if not plain:",
        "../packaging/libraries/test_wheels.py::test_a_wheel_with_a_path_that_leaves_its_folder_is_refused",
    ),
    Mutation(
        7,
        "a package is renamed before its files are written",
        "packaging/format/package_files.py",
        "        yield folder\n"
        "        folder.chmod(0o755)\n"
        "        for inner, _, _ in os.walk(folder):\n"
        "            sync_folder(Path(inner))\n"
        "        _move_into_place(folder, Path(path))\n",
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
        "the shards of a checkpoint are removed before its index",
        "launch/checkpoints/checkpoint_place.py",
        '        self._files.delete(f"{folder}/{INDEX}")\n'
        "        delete(\n"
        "            self._files,\n"
        "            [file.path for file in self._files.walk(folder) if",
        "        delete(\n"
        "            self._files,\n"
        "            [file.path for file in reversed(list(self._files.walk(folder))) if",
        "../launch/checkpoints/test_checkpoint_places.py::test_a_kill_before_any_write_or_removal_leaves_a_whole_checkpoint_to_go_on_from",
    ),
    Mutation(
        7,
        "an attempt publishes shards that another one has removed",
        "launch/checkpoints/checkpoint_place.py",
        "            if size != file.size:\n",
        "            if False:\n",
        "../launch/checkpoints/test_checkpoint_places.py::test_an_attempt_that_was_taken_for_dead_publishes_nothing_once_another_has_begun[memory]",
    ),
    Mutation(
        7,
        "the index of a checkpoint is published before the shards of other ranks",
        "launch/checkpoints/writer.py",
        "            written = [\n                Written(file=mine,",
        '            draft.publish(index.model_copy(update={"files": (mine,)'
        " * self._plan.world_size}))\n"
        "            written = [\n"
        "                Written(file=mine,",
        "../launch/checkpoints/test_checkpoint_writing.py::test_a_kill_at_every_file_operation_leaves_whole_checkpoints_only",
    ),
    Mutation(
        5,
        "a pulled file is taken though its digest is another one",
        "packaging/stores/pull.py",
        "    if size != entry.size or digest.hexdigest() != entry.sha256:\n"
        "        raise _damaged_error(file",
        "    if size != entry.size:\n        raise _damaged_error(file",
        "../packaging/stores/test_stores_hostile.py::test_a_bit_that_flipped_in_the_store_is_noticed[folder]",
    ),
    Mutation(
        7,
        "a second writer takes the number of the first",
        "src/trainload/core/atomic.py",
        "            os.link(temporary, path)\n        except FileExistsError:",
        "            temporary.replace(path)\n        except FileExistsError:",
        "../packaging/stores/test_stores_writers.py::test_processes_that_write_at_once_lose_nothing[folder]",
    ),
    Mutation(
        7,
        "a release appears before its files",
        "packaging/stores/push.py",
        "        sent = send_blobs(target, local.path, local.files, lease, on_progress)\n"
        "        lease.check()\n",
        "        target.publish(name, local.manifest, local.digest, local.files)\n"
        "        sent = send_blobs(target, local.path, local.files, lease, on_progress)\n"
        "        lease.check()\n",
        "../packaging/stores/test_stores_writers.py::test_a_push_that_is_killed_anywhere_shows_a_whole_release_or_none_and_goes_on",
    ),
    Mutation(
        5,
        "a build is loaded although its record says that it is unverified",
        "launch/node/fetched_builds.py",
        "            if not record.is_verified:\n",
        "            if False:\n",
        "../launch/node/test_fetched_builds.py::test_a_record_that_hides_that_a_build_is_unverified_is_refused",
    ),
    Mutation(
        5,
        "a signed build may be relabelled for another target",
        "packaging/stores/stored_builds.py",
        "    if record.target != stored.target or record.files != {\n",
        "    if record.files != {\n",
        "../launch/node/test_fetched_builds.py::test_a_record_that_relabels_a_signed_build_is_refused",
    ),
    Mutation(
        7,
        "gc does not look what pushes rely on",
        "packaging/stores/collect.py",
        "    needed = {digest for path in live for digest in pushes[path].blobs}\n",
        "    needed = set[str]()\n",
        "../packaging/stores/test_stores_gc.py::test_the_blobs_of_a_push_that_was_just_broken_off_wait_for_it[folder]",
    ),
    Mutation(
        7,
        "a scheduler that was paused can promote",
        "src/trainload/retraining/ticks/line_lease.py",
        "        if lease.previous is None or lease.previous_returned:\n",
        "        if True:\n",
        "../retraining/test_lease.py::test_an_owner_that_was_paused_cannot_promote_even_if_it_does_not_ask",
    ),
    Mutation(
        7,
        "a challenger that was promoted before a kill is promoted again",
        "src/trainload/retraining/ticks/tick.py",
        "            if entry.release == trained.release:\n                return entry\n",
        "            pass\n",
        "../retraining/test_tick.py::test_a_tick_that_dies_at_any_write_ends_as_if_it_had_not",
    ),
    Mutation(
        7,
        "a loss that is no number passes under not",
        "src/trainload/retraining/config/expression.py",
        "                return None if inner is None else not inner\n",
        "                return not inner\n",
        "../retraining/test_expression.py::test_what_is_no_finite_number_lets_nobody_pass",
    ),
    Mutation(
        6,
        "commands of a retraining come from the store",
        "src/trainload/retraining/ticks/tick.py",
        "        return config.model_copy(update={key: getattr(self._config, key) for key in OWN}),"
        ' ""\n',
        '        return config, ""\n',
        "../retraining/test_tick.py::test_commands_and_folders_are_those_of_the_file_whatever_the_store_says",
    ),
    Mutation(
        5,
        "data that has changed since it was pinned is trained on",
        "src/trainload/retraining/data/snapshot.py",
        "        if identity != record.identity:\n",
        "        if False:\n",
        "../retraining/test_snapshot.py::test_a_file_that_changed_since_is_noticed",
    ),
    Mutation(
        7,
        "a retraining's old releases take those with them that it can be rolled back to",
        "src/trainload/retraining/ticks/aftermath.py",
        "        kept_releases = {*list(was_current)[: config.retention.releases], *needed}\n",
        "        kept_releases = {*needed}\n",
        "../retraining/test_retraining.py::test_releases_that_were_current_keep_their_files",
    ),
    Mutation(
        7,
        "what another process uses is removed from the cache",
        "launch/node/cache.py",
        "                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "",
        "../launch/node/test_cache.py::test_what_another_process_uses_stays_until_it_ends",
    ),
    Mutation(
        5,
        "what is not trained lies in one file with what is",
        "packaging/tensors/weight_shards.py",
        "    others = [spec for spec in specs if changing is not None and spec.name not in"
        " changing]\n",
        "    first, others = list(specs), []\n",
        "../launch/checkpoints/test_unchanged_weights.py::test_a_run_leaves_the_files_of_what_it_does_not_train",
    ),
    Mutation(
        7,
        "a driver whose number another process has is taken for alive",
        "src/trainload/core/processes.py",
        "        return _start_time(int(parts[2])) != parts[3]\n",
        "        return not _start_time(int(parts[2]))\n",
        "../core/test_processes.py::test_a_process_whose_number_is_used_again_has_ended",
    ),
    Mutation(
        7,
        "what was promoted is handed over though it was rolled back",
        "src/trainload/retraining/ticks/tick_stages.py",
        "        if not promoted and aftermath.handed_over(handover) in (None, name):\n",
        "        if not promoted:\n",
        "../retraining/test_serving.py::test_a_tick_after_a_rollback_hands_over_what_is_current",
    ),
    Mutation(
        5,
        "held-out rows may change between the two evaluations",
        "src/trainload/retraining/data/snapshot.py",
        "        _check_same(snapshot.held_out)\n",
        "        pass\n",
        "../retraining/test_retraining.py::test_held_out_rows_that_change_between_two_evaluations_are_noticed",
    ),
    Mutation(
        7,
        "the same tick elsewhere is asked to stop",
        "src/trainload/retraining/ticks/tick.py",
        "                and lease.record.tick < name\n"
        "                and asked_id != lease.record.id\n",
        "                and asked_id != lease.record.id\n",
        "../retraining/test_tick.py::test_the_same_tick_elsewhere_is_waited_for_and_not_asked_to_stop",
    ),
    Mutation(
        7,
        "a record is written that cannot be read again",
        "src/trainload/retraining/ticks/tick_records.py",
        '        kind.from_bytes(data, f"{self._files.url}/{path}")\n'
        "        if self._files.create(",
        "        if self._files.create(",
        "../retraining/test_tick.py::test_a_record_that_could_not_be_read_again_is_not_written",
    ),
    Mutation(
        7,
        "an update is applied although the gradient is not finite",
        "sharding/rewriting/rank_update.py",
        "[torch.where(usable, *pair) for pair in zip(after, before, strict=True)]",
        "[pair[0] for pair in zip(after, before, strict=True)]",
        "../launch/debugging/test_unchanged_state.py::test_parameters_and_optimizer_state_stay",
    ),
    Mutation(
        7,
        "a gradient that is no number is trained on",
        "launch/worker/engine.py",
        "        if result.loss_scale is None and not is_usable:\n",
        "        if False:\n",
        "../launch/worker/test_diverged.py::test_an_infinite_gradient_that_is_not_clipped_ends_the_run",
    ),
    Mutation(
        5,
        "a build is verified by the comparisons of its maker",
        "launch/api/verified_build.py",
        "            forget_comparisons(folder)  # those of its maker\n",
        "",
        "../launch/api/test_make_build.py::test_comparisons_of_its_maker_do_not_count",
    ),
    Mutation(
        4,
        "attention in the body of control flow is not deterministic",
        "launch/node/deterministic_attention.py",
        "    for part in module.modules():  # bodies of control flow are modules of their own\n",
        "    for part in (module,):\n",
        "../launch/node/test_deterministic_attention.py::test_gradients_in_the_bodies_of_control_flow_are_replaced",
    ),
    Mutation(
        4,
        "graphs are derived with attention of cuDNN",
        "autograd_trace/derivation/aot.py",
        "        if is_deterministic:\n"
        "            stack.enter_context(deterministic_attention())\n",
        "",
        "../launch/node/test_deterministic_attention.py::"
        "test_graphs_are_derived_without_attention_of_cudnn_if_they_must_be_deterministic",
    ),
    Mutation(
        3,
        "kernels are compiled for the example's rows",
        "autograd_trace/compiling/call_sizes.py",
        "            hints[symbol] = sympy.Integer(max(sizes[str(symbol)], _LEAST_SIZE))\n",
        "            pass\n",
        "../autograd_trace/compiling/test_call_sizes.py::test_hints_are_the_sizes_of_the_largest_call",
    ),
    Mutation(
        7,
        "statistics count elements once for every rank that holds them",
        "launch/debugging/update_sums.py",
        "        return is_first_copy and is_first_share and is_first_holder\n",
        "        return True\n",
        "../launch/debugging/test_live_statistics.py"
        "::test_every_plan_has_the_statistics_of_one_process[zero0]",
    ),
    Mutation(
        7,
        "copies that differ between ranks are not compared",
        "launch/debugging/replicas.py",
        "                if len(by_value) > 1:\n",
        "                if len(by_value) > 2:\n",
        "../launch/debugging/test_live_statistics.py"
        "::test_a_run_warns_that_copies_of_a_parameter_differ",
    ),
    Mutation(
        7,
        "values are computed in their own dtypes where float64 is compared",
        "launch/debugging/precise_graphs.py",
        "        if is_higher_order(n.target) or n.target in _VIEWS_OF_BITS"
        " or not _has_floats(args, kwargs):\n",
        "        if True:\n",
        "../launch/debugging/test_departing_values.py"
        "::test_numbers_that_are_lost_in_half_precision_are_found_with_their_line[0]",
    ),
    Mutation(
        7,
        "rounding explains every difference of values",
        "launch/debugging/value_departures.py",
        "        return self.distance > self.explained\n",
        "        return False\n",
        "../launch/debugging/test_departing_values.py"
        "::test_a_layer_that_computes_something_else_is_found",
    ),
)
