"""The file that `retrain init` writes: every key; optional ones are commented out."""

from __future__ import annotations

TEMPLATE = """\
# A retraining of trainload: docs/guides/retraining.md. `trainload retrain check FILE` validates it.
# Relative paths start at the folder of this file. Durations are written as 90s, 30m, 6h, 7d, 2w.

store: store                        # releases and records: a folder, or a URL such as s3://models/store
line: main                          # line of releases in the store
package: package.tl                 # published as the first release of the line, if it has none
runs: retraining                    # folders of runs, on storage that all nodes share
# attempts: 3                       # failures after which a tick is abandoned

data:
  files: data/*.parquet             # paths, folders, patterns or URLs; a list of them
  # window:
  #   kind: new                     # new: files that no tick has used
  #                                 # path: files: data/{time:%Y/%m/%d}/*.parquet
  #                                 # column: rows by their timestamps
  #   since: tick                   # tick, or promoted: files of rejected ticks are used again
  #   span: 7d                      # for path and column: period before the scheduled time
  #   column: time                  # for column: column with timestamps
  # bad: refuse                     # files with a missing column or a NaN: refuse, or skip the file
  # least_rows: 1                   # with fewer rows, there is no new data
  # drop: [id]                      # columns that are not inputs
  # inspect_rows: 1000000           # rows whose values are inspected

evaluation:
  hold_out: 0.1                     # share of the tick's rows; or
  # files: held-out.parquet
  # batches: 100                    # maximum
  # slices:
  #   column: country               # groups of rows with their own requirement
  #   require: eval.loss <= champion.eval.loss * 1.05
  #   values: [DE, FR]              # default: all values
  #   least_rows: 100               # smaller groups are not evaluated

# train:
#   steps: 500                      # or epochs: 1; default: the package's
#   start: current                  # or first: from the weights that the line started with
#   optimizer: fresh                # or kept: the optimizer state of the current release's run
#   checkpoint_every: 100
#   set: {lr: 3e-4}                 # as in `trainload launch --set`

# cluster:
#   backend: ray                    # or local: one process
#   address: auto                   # address of a Ray cluster; default: a local one
#   nodes: 1
#   workers: 1                      # devices per node
#   device: cpu                     # or cuda
#   strategy: zero3                 # default: chosen as by `trainload launch`
#   plan: plan.json                 # plan from `trainload plan`, instead of these keys
#   compile: true

gate:
  require: eval.loss <= champion.eval.loss * 1.01
  # drift:
  #   warn: 0.2                     # population stability index of a column
  #   bar: 1.0                      # the challenger is rejected from this value on

schedule:
  cron: "0 3 * * *"                 # or every: 6h
  zone: UTC
  # missed: once                    # ticks missed while nothing ran: run the last one once, or skip

# lease:
#   seconds: 60s                    # silence after which another scheduler takes over
#   taken: forbid                   # if a tick is running: forbid, queue or replace
#   patience: 6h

# retention:
#   runs: 3
#   releases: 20                    # earlier current releases that keep their files; default: all

# handover:                         # when a release is promoted
#   form: pt2                       # huggingface, pt2 or aoti; default: huggingface
#   place: serving
#   graph: predict                  # only for pt2 and aoti
#   timeout: 10m
#   command: [./reload.sh]          # receives the tick's record on standard input,
#                                   # and the export's path as its last argument

# notify:
#   command: [./tell.sh]            # receives the tick's record as JSON on standard input
#   outcomes: [promoted, rejected, conflict, bad data, failed]
#   timeout: 60s

# mlflow:                           # the current release in MLflow's model registry
#   model: main                     # default: the line
#   alias: champion
#   timeout: 60s

# webhooks:                         # HTTP servers that receive events as signed JSON
#   - url: https://example.org/hook # or a reference: ${env:HOOK_URL}
#     secret: ${env:HOOK_SECRET}    # default: messages are not signed
#     events: [promoted, rejected, rolled back, failed]
#     timeout: 10s
#     attempts: 3
"""
