#!/usr/bin/env bash
# Runs the recipe `tiny` on two CPU cores in about twelve minutes: a model of 1.5 million random weights learns to search
# a world of 6,000 documents, first from a teacher, then from its own episodes, and a page shows what it learned.
#
#   scripts/tiny.sh OUT [--toy]
#
# Run the same line again after an interrupt: it resumes where it stopped, and does nothing twice. --toy takes the same
# steps in about two minutes, with a model that learns next to nothing. Needs: pip install -e ".[train]" (for the CPU
# build of torch, install that first). PYTHON chooses the interpreter.
set -euo pipefail

out='' sizes=()
for word in "$@"; do
  case $word in
    --toy) # too short to be sure of progress
      sizes=(--set documents=200 --set samples=1 --set epochs=8 --set checked=20 --set batches=2 --set tasks=10)
      sizes+=(--set rl.gates.progress=false --set compare.gates.better=false)
      ;;
    -*) out='' && break ;;
    *) out=$word ;;
  esac
done
[ -n "$out" ] || { sed -n "2,9s/^# \{0,1\}//p" "$0" >&2; exit 2; }
"${PYTHON:-python3}" -m harness1 recipe run tiny --out "$out" "${sizes[@]}"
echo "Done. Open $out/view.html; \`harness1 view RUN...\` makes such a page of any runs."
