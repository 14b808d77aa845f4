"""The file that `retrain init` writes: every key with its meaning; optional keys are commented out."""

from __future__ import annotations

TEMPLATE = """\
# A retraining of trainload: docs/retraining.md. `trainload retrain check FILE` says whether it is right.
# Relative paths start at this file's folder. Times are written 90s, 30m, 6h, 7d, 2w.

store: store                        # of releases and records: a folder, or a URL such as s3://models/store
line: main                          # of the store's releases
package: package.tl                 # published as the line's first release, where it has none
runs: retraining                    # runs' folders, on storage that all nodes share
# attempts: 3                       # how often a tick may fail before it is given up

data:
  files: data/*.parquet             # paths, folders, patterns or URLs; a list of them
  # window:
  #   kind: new                     # new: files that no tick had yet; path: files: data/{time:%Y/%m/%d}/*.parquet; column
  #   since: tick                   # tick, or promoted: rejected ticks' files come again
  #   span: 7d                      # of path and column: how far back from the scheduled time
  #   column: time                  # of column: timestamps
  # bad: refuse                     # files with a column missing or a NaN: refuse the tick, or skip the file
  # least_rows: 1                   # with fewer there is no new data
  # drop: [id]                      # columns that are no inputs
  # inspect_rows: 1000000           # rows whose values are looked at

evaluation:
  hold_out: 0.1                     # a share of the tick's rows; or
  # files: held-out.parquet
  # batches: 100                    # at most
  # slices:
  #   column: country               # groups of rows with a bar of their own
  #   require: eval.loss <= champion.eval.loss * 1.05
  #   values: [DE, FR]              # left out: all that there are
  #   least_rows: 100               # a smaller group is not judged

# train:
#   steps: 500                      # or epochs: 1; left out: the package's
#   start: current                  # or first: from the weights that the line began with
#   optimizer: fresh                # or kept: its state goes on where the current release's run ended
#   checkpoint_every: 100
#   set: {lr: 3e-4}                 # as of `trainload launch --set`

# cluster:
#   backend: ray                    # or local: one process
#   address: auto                   # of a Ray cluster; left out: one on this machine
#   nodes: 1
#   workers: 1                      # devices of each node
#   device: cpu                     # or cuda
#   strategy: zero3                 # left out: as `trainload launch` chooses
#   plan: plan.json                 # that `trainload plan` wrote, in place of these
#   compile: true

gate:
  require: eval.loss <= champion.eval.loss * 1.01
  # drift:
  #   warn: 0.2                     # population stability index of a column
  #   bar: 1.0                      # from here on the challenger is rejected

schedule:
  cron: "0 3 * * *"                 # or every: 6h
  zone: UTC
  # missed: once                    # times that passed while nothing ran: run the last one once, or skip

# lease:
#   seconds: 60s                    # how long a scheduler may be silent before another one takes its place
#   taken: forbid                   # forbid, queue or replace, where a tick is under way
#   patience: 6h

# retention:
#   runs: 3
#   releases: 20                    # of those that were current, so many keep their files; left out: all

# handover:                         # when a release is promoted
#   form: pt2                       # huggingface, pt2 or aoti; left out: huggingface
#   place: serving
#   graph: predict                  # of pt2 and aoti alone
#   timeout: 10m
#   command: [./reload.sh]          # gets the tick's record on standard input, and the export's path as its last word

# notify:
#   command: [./tell.sh]            # gets the tick's record as JSON on standard input
#   outcomes: [promoted, rejected, conflict, bad data, failed]
#   timeout: 60s
"""
