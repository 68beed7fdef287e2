#!/usr/bin/env bash
# Runs the whole pipeline on two CPU cores in about ten minutes: a model of 1.5 million random weights learns to search a
# world of 2,000 documents, first from a teacher, then from its own episodes, and a page shows what it learned.
#
#   scripts/tiny.sh OUT [--toy]
#
# Run the same line again after an interrupt: each command skips finished work and resumes where it stopped. --toy takes
# the same steps in about a minute, with a model that learns next to nothing. Needs: pip install -e ".[train]" (for the
# CPU build of torch, install that first). PYTHON chooses the interpreter.
set -euo pipefail

out='' documents=2000 epochs=2 samples=2 batches=30 tasks=200
for word in "$@"; do
  case $word in
    --toy) documents=200 epochs=8 samples=1 batches=2 tasks=10 ;;
    -*) out='' && break ;;
    *) out=$word ;;
  esac
done
[ -n "$out" ] || { sed -n "2,9s/^# \{0,1\}//p" "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")/.." && pwd)
export OMP_NUM_THREADS=1 # the matrices are too small to split over threads
python() { command "${PYTHON:-python3}" "$@"; } # `command`, or PYTHON=python would call itself
harness1() { python -m harness1 "$@"; }
step() { # print the next step and the elapsed time
  printf '\n[%d min %02d s] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$1"
}
# The smallest environment, the same for every step: five turns, three tools, prompts of at most 384 tokens.
same=(--config micro --set machine.model.threads=1)

step 'Documents and tasks: a generated world, and questions about it that one or two documents can answer.'
python "$here/benchmarks/micro.py" "$out" --only world --size "$documents"

step 'Index: terms and trigrams of the documents.'
harness1 index "$out/world" --out "$out/index" "${same[@]}"
data=(--data "$out/world" --index "$out/index")

step 'Model: a tokenizer trained on these texts, and random weights.'
python "$here/benchmarks/micro.py" "$out" --only model --size "$documents"

step 'Teacher: it sees the gold, and takes 15 % of its turns at random, so that there is something left to learn.'
harness1 sft collect --teacher silent:mixed:0.85 "${data[@]}" --samples "$samples" --tokenizer "$out/model" \
  --out "$out/teacher" "${same[@]}"

step 'Rows: the exact tokens of the episodes that pass the gates, with the trained ones marked.'
harness1 sft build "$out/teacher" --out "$out/rows" "${same[@]}"

step 'Supervised fine-tuning: from random weights to valid calls and a mediocre searcher.'
harness1 sft train "$out/rows" --model "$out/model" --out "$out/sft" "${same[@]}" \
  --set train.epochs="$epochs" --set train.batch_rows=16 --set train.rate=3e-3 --set train.schedule=cosine \
  --set train.warmup=0.05 --set train.watch.every=0 --set train.watch.tasks=0 --set train.watch.metric=nll

step "CISPO: $batches batches of 16 groups of 8 of its own episodes; what earns more than its group becomes more likely."
harness1 rl train "${data[@]}" --model "hf:$out/sft" --out "$out/rl" "${same[@]}" \
  --set rl.batches="$batches" --set train.watch.every="$batches" --set train.watch.tasks="$((tasks / 2))"

step 'Evaluation on the test split: random actions, both models, and the oracle as an upper bound.'
for system in silent:random "hf:$out/sft" "hf:$out/rl" silent:oracle; do
  case $system in
    hf:*) window=() ;;
    *) window=(--set env.context_window=1024) ;; # counted without a tokenizer, as four characters to a token
  esac
  harness1 eval "$out/world" --split test --limit "$tasks" --samples 2 --index "$out/index" --policy "$system" \
    --out "$out/eval-$(basename "${system//:/-}")" "${same[@]}" "${window[@]}"
done

step 'What reinforcement learning changed, task by task.'
harness1 compare "$out/eval-sft" "$out/eval-rl"

step 'View: every episode of both models turn by turn, and the training, in one file.'
harness1 view "$out/eval-sft" "$out/eval-rl" "$out/rl" --out "$out/view.html"
step "Done. Open $out/view.html; \`harness1 view RUN...\` makes such a page of any runs."
