#!/usr/bin/env bash
# Tables on a machine with a GPU that is yours for some minutes and reaches no network.  Run there,
# in a copy of the repository:
#
#   scripts/lease.sh keep                  copy the tree and carry/ out of it, into $LEASE
#   FLOWDUP_COMMIT=... scripts/lease.sh begin SECONDS QUEUE
#                                              the same, then work on the queue in the background
#   scripts/lease.sh watch SECONDS         wait, tell how far it is, bring records to $OUT
#
# carry/ holds what is not tracked: data sets, in as many calls as they need; carry/unpack, if there
# is one, is run first and writes to $FLOWDUP_DATA.  QUEUE is a file; each line of it has arguments
# of `python -m flowdup.campaign`, and gets the seconds that those before have left:
#
#   --jobs 13 --seeds 1 paper-rotated-mnist paper-femnist
#   --jobs 5 "paper-cifar10-resnet18/FedAvg + calibrated EM" --set engine.clients_at_once=34
#
# Elsewhere: `flowdup reproduce all --merge $OUT/records.jsonl --no-run && make tables`.
set -euo pipefail
lease=${LEASE:-/tmp/lease}
export FLOWDUP_DATA=${FLOWDUP_DATA:-$lease/data} OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
device=${DEVICE:-cuda} precision=${PRECISION:-bf16}
margin=75 # seconds that the last runs need to be saved and brought back

keep() {
  mkdir -p "$lease/tree" "$lease/carry" "$FLOWDUP_DATA"
  cp -r src experiments results scripts "$lease/tree"
  [ ! -d carry ] || cp -r carry/. "$lease/carry"
}

work_on() {  # QUEUE END
  cd "$lease/tree"
  trap 'echo "== the queue has ended"' EXIT
  if [ -e "$lease/carry/unpack" ]; then (cd "$lease/carry" && bash unpack); fi
  while read -r -u 3 line || [ -n "$line" ]; do
    left=$(($2 - $(date +%s)))
    if [ "$left" -le 0 ] || [ -z "$line" ] || [ "${line:0:1}" = "#" ]; then continue; fi
    echo "== $left seconds for: $line"
    mapfile -t arguments < <(xargs printf '%s\n' <<<"$line") # which reads quotes
    PYTHONPATH=src python3 -m flowdup.campaign "${arguments[@]}" --seconds "$left" \
      --set "engine.device=$device" --set "engine.precision=$precision" \
      --merge results/runs.jsonl --records "$lease/records.jsonl" \
      --work "$lease/runs" --results "$lease/results" || echo "== it ended with $?"
  done 3<"$1"
}

begin() {  # SECONDS QUEUE
  local end=$(($(date +%s) + $1 - margin))
  keep
  cp "$2" "$lease/queue"
  if [ "$device" = cuda ]; then nvidia-cuda-mps-control -d || true; fi # it may run already
  setsid nohup bash "$lease/tree/scripts/lease.sh" work_on "$lease/queue" "$end" >"$lease/log" 2>&1 </dev/null &
}

watch() {  # SECONDS
  for ((waited = 0; waited < $1; waited += 5)); do
    sleep 5
    if grep -q '^== the queue has ended' "$lease/log"; then break; fi
  done
  tail -n 40 "$lease/log"
  if [ -e "$lease/records.jsonl" ]; then cp "$lease/records.jsonl" "${OUT:-.}"; fi
}

"${@:?one of keep, begin, watch}"
