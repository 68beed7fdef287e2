"""Runs the commands of trials on the nodes of a Ray cluster, which share a file system.

Optuna keeps the study, prunes and samples on every scale; Ray gives slots. Ray Tune would bring a second notion of
trial, folder and resuming beside that of recipes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness1.errors import InfrastructureFault, optional
from harness1.recipe.run import Execute, run_command


def on_cluster(address: str, cores: float = 1.0) -> Execute:
    """Return what runs a command on some node. Folders must be absolute paths that all nodes have.

    Args:
        address: of the cluster; "auto": the one that this machine belongs to; "local": a new one on this machine.
        cores: that each process of a command takes.

    Raises:
        MissingExtra: Ray is not installed.
        InfrastructureFault: there is no cluster at the address; when a command runs: its node was lost.
    """
    with optional("ray"):
        import ray
    try:
        ray.init(address=address, log_to_driver=False, ignore_reinit_error=True)
    except ConnectionError as error:
        raise InfrastructureFault(f"no Ray cluster at {address}: {error}") from error
    remote = ray.remote(max_retries=0)(run_on_node)

    def execute(words: Sequence[str], log: Path, processes: int) -> int:
        try:
            return int(ray.get(remote.options(num_cpus=cores * processes).remote(tuple(words), str(log), processes)))
        except ray.exceptions.RayError as error:
            raise InfrastructureFault(f"a node of the cluster was lost: {error}") from error

    return execute


def run_on_node(words: Sequence[str], log: str, processes: int) -> int:
    """Run a command on this node, its output in a file; return its exit code."""
    return run_command(words, Path(log), processes, quiet=True)
