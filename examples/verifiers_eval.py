"""Evaluate a model by verifiers; the key of its server is taken from the variable OPENAI_API_KEY.

pip install "harness1[verifiers]"
python examples/verifiers_eval.py MODEL URL DATASET INDEX OUT
"""

import subprocess
import sys
from pathlib import Path

if len(sys.argv) != 6:
    print("usage: python examples/verifiers_eval.py MODEL URL DATASET INDEX OUT", file=sys.stderr)
    sys.exit(2)
model, url, data, index, out = sys.argv[1:6]
run = f"""
model = "{model}"
push = false
output_dir = "{out}"
[select]
limit = 3
[client]
base_url = "{url}"
api_key_var = "OPENAI_API_KEY"
[env.taskset]
id = "harness1_verifiers"
data = "{data}"
[env.agent.harness]
id = "harness1_verifiers"
index = "{index}"
settings = ["env.rendering.order=epoch"]
[env.agent.runtime]
type = "subprocess"
"""
Path(out).mkdir(parents=True, exist_ok=True)
(Path(out) / "run.toml").write_text(run)
vf_eval = Path(sys.executable).parent / "vf-eval"
sys.exit(subprocess.run([vf_eval, "@", Path(out) / "run.toml", "--no-rich"], check=False).returncode)
