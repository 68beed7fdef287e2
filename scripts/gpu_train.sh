#!/usr/bin/env bash
# Takes a small model through supervised fine-tuning and CISPO, then evaluates it greedily on the test splits beside
# baselines.
#
#   scripts/gpu_train.sh --out RUNS [--model smollm2-135m] [--device cuda] [--tasks N] [--limit N] [--set A.B=VALUE]...
#                        DATASET...
# Each DATASET has a train and a test split. --tasks tasks of each test split are played (default 100); the teacher plays
# --limit tasks of each train split (default all). Every step resumes where it stopped: run the same command again after
# an interrupt, or later. --sft-set and --rl-set override settings of one training step only.
set -euo pipefail

usage() { sed -n "2,10s/^# \{0,1\}//p" "$0" >&2; exit 2; }
model=smollm2-135m device=cuda tasks=100 limit=0 out='' datasets=() all=() sft=() rl=()
while [ $# -gt 0 ]; do
  case $1 in
    --out) out=$2; shift 2 ;;
    --model) model=$2; shift 2 ;;
    --device) device=$2; shift 2 ;;
    --tasks) tasks=$2; shift 2 ;;
    --limit) limit=$2; shift 2 ;;
    --set) all+=(--set "$2"); shift 2 ;;
    --sft-set) sft+=(--set "$2"); shift 2 ;;
    --rl-set) rl+=(--set "$2"); shift 2 ;;
    -*) usage ;;
    *) datasets+=("$1"); shift ;;
  esac
done
[ -n "$out" ] && [ ${#datasets[@]} -gt 0 ] || usage
here=$(cd "$(dirname "$0")/.." && pwd)
harness1() { "${PYTHON:-python3}" -m harness1 "$@"; }
name() { basename "$1" | tr ':' '-'; }

if [ "$device" = cuda ]; then # one GPU of 40 GB or more
  all=(--set policy.dtype=bfloat16 --set machine.model.rows=256 --set machine.model.prefill_tokens=65536 --set machine.concurrency=256 "${all[@]}")
  sft=(--set train.dtype=bfloat16 --set train.micro_tokens=65536 --set train.batch_rows=32 --set train.rate=1e-3 "${sft[@]}")
  # All weights are trained: they fit such a GPU.
  rl=(--set train.lora.rank=0 --set train.rate=1e-5 --set train.dtype=bfloat16 --set train.micro_tokens=65536 --set rl.groups=24 --set rl.batches=15 "${rl[@]}")
fi
all=(--set "machine.model.device=$device" "${all[@]}")
teach=(--config sft/small "${all[@]}")
learn=(--config rl/small "${all[@]}")

runs=()
for dataset in "${datasets[@]}"; do
  run=$out/taught-$(name "$dataset")
  harness1 sft collect --teacher oracle --data "$dataset" --split train --limit "$limit" --tokenizer "$model" \
    --out "$run" "${teach[@]}" "${sft[@]}"
  runs+=("$run")
done
harness1 sft build "${runs[@]}" --out "$out/rows" "${teach[@]}" "${sft[@]}"
harness1 sft train "$out/rows" --model "$model" --out "$out/sft" "${teach[@]}" "${sft[@]}"
data=()
for dataset in "${datasets[@]}"; do data+=(--data "$dataset"); done
harness1 rl train "${data[@]}" --model "hf:$out/sft" --out "$out/rl" "${learn[@]}" "${rl[@]}"

for dataset in "${datasets[@]}"; do
  for system in scripted single-shot "hf:$model" "hf:$out/sft" "hf:$out/rl"; do
    case $system in hf:"$model") label=base ;; *) label=$(name "${system#hf:}") ;; esac
    harness1 eval "$dataset" --split test --limit "$tasks" --policy "$system" \
      --out "$out/eval-$(name "$dataset")-$label" --set policy.temperature=0 "${learn[@]}"
  done
done
harness1_report=("$here/benchmarks/training_report.py" "$out")
"${PYTHON:-python3}" "${harness1_report[@]}"
