"""Make a released policy of a checkpoint of adapters on a fetched model.

    python benchmarks/release_policy.py CHECKPOINT --base smollm2-135m --config sft/handles --name trained [--set A.B=V]

It writes `harness1/policies/NAME`: the adapters, their card, and the environment and sampling of the configuration. The
model card, `README.md`, is written by hand.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness1.config import load_config
from harness1.env.environment import env_hash
from harness1.model_folder import ADAPTER_CONFIG, base_folder, fetched_models, folder_hash
from harness1.models.adapters import ADAPTER_WEIGHTS
from harness1.models.checkpoint import CHECKPOINT, read_checkpoint
from harness1.models.spec import CONFIG
from harness1.runs.folder import toml_lines

HOME = Path(__file__).parent.parent / "harness1" / "policies"
HEADER = "# The environment and the sampling that this policy was measured with."


def release(checkpoint: Path, base: str, config: str, out: Path, changed: Sequence[str] = ()) -> None:
    """Write a released policy to a folder; raise SystemExit for a checkpoint of another base, environment or
    format."""
    card, settings = read_checkpoint(checkpoint), load_config(config, list(changed))
    if card is None or folder_hash(base_folder(checkpoint)) != folder_hash(fetched_models() / base):
        raise SystemExit(f"{checkpoint} holds no adapters on {base}")
    if env_hash(settings.env) != card.env_hash:
        raise SystemExit(f"{checkpoint} was trained for another environment than {' '.join([config, *changed])}")
    if settings.policy.format not in ("auto", card.format):
        raise SystemExit(f"{checkpoint} was trained for the format {card.format}, not {settings.policy.format}")
    out.mkdir(parents=True, exist_ok=True)
    for name in (ADAPTER_WEIGHTS, CHECKPOINT):
        shutil.copyfile(checkpoint / name, out / name)
    adapters = msgspec.json.decode((checkpoint / ADAPTER_CONFIG).read_bytes())
    named = msgspec.json.encode({**adapters, "base_model_name_or_path": base})
    (out / ADAPTER_CONFIG).write_bytes(msgspec.json.format(named))
    tables = {"policy": msgspec.to_builtins(settings.policy), "env": msgspec.to_builtins(settings.env)}
    (out / CONFIG).write_text("\n".join([HEADER, *toml_lines(tables)]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--base", required=True, help="name of the fetched model")
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], dest="changed", metavar="A.B=VALUE")
    parser.add_argument("--name", required=True)
    asked = parser.parse_args()
    release(asked.checkpoint, asked.base, asked.config, HOME / asked.name, asked.changed)
