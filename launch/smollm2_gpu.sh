#!/usr/bin/env bash
# Better drafts for SmolLM2, and a long text with them, on one GPU. The same call resumes what was stopped.
#
#   launch/smollm2_gpu.sh drafts [MINUTES [section.field=value ...]]   default: 5
#   launch/smollm2_gpu.sh length [TOKENS [OPTION ...]]                 default: 100000; OPTIONS of `longdraft bench`
#
# drafts: train the shipped heads (a fifth of the minutes) and block further on all that fetch_texts.sh fetches. The
#   last lines of each training compare it with the shipped draft. Twelve timed steps decide how many fit the minutes.
# length: decode after 64 tokens with TokenSwift (these heads or the shipped ones) and plainly, by SmolLM2 with YaRN for
#   131,072 positions. Prints ms/token every 10,240 tokens, and the equal tokens: all of them with LONGDRAFT_EXACT=1.
# RUNS: the folder for what is trained and measured (default: runs).
set -euo pipefail
cd "$(dirname "$0")/.."
[ -t 2 ] || export TQDM_DISABLE=1  # a log needs no progress bars
python=${PYTHON:-python3} task=${1:-} amount=${2:-} data=data/smollm2-all yarn=data/smollm2-yarn runs=${RUNS:-runs}
longdraft() { echo "\$ longdraft $*" && "$python" -m longdraft.launch.cli "$@"; }
if [ "$task" = drafts ]; then
  if [ ! -e $data/manifest.json ]; then
    launch/fetch_texts.sh data/texts
    longdraft prepare configs/data/smollm2-mixed.yaml max_tokens=1_000_000_000 seq_len=4096 --target smollm2-135m --out $data
  fi
  for method in tokenswift longspec; do
    run="$runs/$method-smollm2-gpu" share=$([ $method = longspec ] && echo 0.8 || echo 0.2)
    train=(train configs/$method/smollm2-gpu.yaml --num-gpus 1 log.wandb=disabled train.run_dir="$run" "${@:3}")
    if [ -e "$run/config.yaml" ]; then
      steps=$(sed -n 's/^  steps: //p' "$run/config.yaml")
    else
      rm -rf "$run/measured"
      longdraft "${train[@]}" train.steps=12 train.run_dir="$run/measured" optimizer.warmup_steps=0 draft.start_from=null \
        decoding.every=0 heldout.rows=1 log.every=1
      steps=$("$python" -c "import sys; from statistics import median; from longdraft.train.tracking import read_metrics
seconds = [record['step_s'] for record in read_metrics(sys.argv[1]) if 'step_s' in record]
print(max(1, int(60 * $share * ${amount:-5} / median(seconds[6:]))))" "$run/measured")  # the first ones compile
    fi
    longdraft "${train[@]}" train.steps="$steps"
    [ -e "$run/checkpoints/step_$(printf %06d "$steps")" ] || exit 1  # it was stopped
    [ -e "$run/draft/config.json" ] || longdraft export "$run"  # else `length` could not resume its text
    echo "To ship it: cp $run/draft/{config.json,model.safetensors} models/shipped/smollm2-135m-$method"
  done
elif [ "$task" = length ]; then
  [ -e $yarn ] || "$python" - $yarn <<'PY'
import os, sys, torch
from longdraft.models.hf import load_tokenizer, load_transformers
model = load_transformers("smollm2-135m", torch.bfloat16)
model.config.rope_parameters |= {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}
load_tokenizer("smollm2-135m").save_pretrained(sys.argv[1] + "-part")
model.save_pretrained(sys.argv[1] + "-part")
os.rename(sys.argv[1] + "-part", sys.argv[1])
PY
  heads="$runs"/tokenswift-smollm2-gpu/draft
  [ -e "$heads/config.json" ] || heads=smollm2-135m-tokenswift
  longdraft bench --target $yarn --draft "$heads" --text-file README.md --prompt-tokens 64 --nodes all --exactness off \
    --new-tokens "${amount:-100000}" --preset tokenswift-qwen2.5-1.5b --out "$runs/length-exact${LONGDRAFT_EXACT:-0}" "${@:3}"
else
  sed -n '2,12s/^# \?//p' "$0" >&2
  exit 2
fi
