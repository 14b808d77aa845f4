#!/bin/sh
# Publish a package, and write the manifest of the job that trains it: submit.sh PACKAGE > job.yaml
#
# PLACE   URL of everything: store, rows, run and output
# IMAGE   image of the pods
# Further arguments are options of `trainload launch`.
set -eu
package=$1
shift
trainload push "$package" "$PLACE/store" --line gpt >&2
trainload manifest kuberay "$PLACE/store#gpt" --name gpt --image "$IMAGE" --store "$PLACE" \
    --data 'rows/*.parquet' --memory 4Gi --secret s3-keys --patch "$(dirname "$0")/cluster.yaml" \
    -- --output trained/gpt.tl "$@"
