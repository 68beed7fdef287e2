"""Configuration: one frozen value, strict about keys, and every field of it counts."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from harness1.cli.options import config_hashes
from harness1.config import LONGEST, Config, Env, Index, configurations, load_config, present_tree
from harness1.config.env import read_index_description
from harness1.config.settings import REMOVED, SWITCHES, Settings, differences, notes, to_record
from harness1.config.training import TERMS, Reward
from harness1.env import environment
from harness1.env.environment import env_hash
from harness1.errors import ConfigError
from harness1.memory.ranking import FITTED
from harness1.runs.folder import public_config, toml_lines
from harness1.training import trainer

ROOT = Path(__file__).parent.parent
PAPER, RECIPE, RL_RECIPE = (configurations()[name] for name in ("paper", "sft/paper", "rl/paper"))


def leaves(settings: Settings, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every scalar setting with its dotted path."""
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, Settings):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def changed(settings: Settings, path: str) -> str:
    """An override that gives a setting another value that is allowed."""
    *groups, name = path.split(".")
    owner: Any = settings
    for group in groups:
        owner = getattr(owner, group)
    value = getattr(owner, name)
    if path == "mechanisms":
        return "env.mechanisms=[]"
    field = next(field for field in msgspec.structs.fields(owner) if field.name == name)
    if isinstance(value, bool):
        new: Any = str(not value).lower()
    elif isinstance(value, str):
        new = next((choice for choice in get_args(field.type) if choice != value), "other")
    elif isinstance(value, int):
        new = value - 1 if path.endswith("cap") else value + 1
    elif isinstance(value, tuple):
        new = [each + 1 for each in value]
    else:
        new = value / 2 + 0.01
    return f"env.{path}={new}"


def test_the_defaults_are_the_published_constants_but_for_five_settings() -> None:
    published, default = (dict(leaves(config)) for config in (load_config(PAPER), Config()))
    assert {path: (value, default[path]) for path, value in published.items() if value != default[path]} == {
        "env.mechanisms": (Env().switch(rank=False, leads=False, marks=False).mechanisms, Env().mechanisms),
        "env.auto_populate.by": ("first", "evidence"),
        "env.read.by": ("order", "evidence"),
    }
    # Quotas name datasets, and no default speaks of anybody's; checkpointing saves memory and changes no gradient.
    assert load_config(RECIPE).train.checkpointing
    recipe = load_config(RECIPE, ["sft.gates.quotas={}", "train.checkpointing=false"])
    assert recipe == msgspec.structs.replace(Config(), env=load_config(PAPER).env)
    trained = load_config(RL_RECIPE)
    assert (trained.rl, trained.env) == (Config().rl, recipe.env)


def test_the_files_of_published_constants_spell_out_every_setting() -> None:
    paper = msgspec.toml.decode(PAPER.read_bytes())
    tree = paper | msgspec.toml.decode(RECIPE.read_bytes()) | {"env": paper["env"]}
    tree["sft"]["gates"]["quotas"] = {}
    tree["train"]["checkpointing"] = False
    tree["rl"] = msgspec.toml.decode(RL_RECIPE.read_bytes())["rl"]
    full = msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(Config(), env=load_config(PAPER).env)))
    full.pop("machine")
    assert tree == full


@pytest.mark.parametrize("path", [path for path, _ in leaves(Env()) if path not in ("plugins", "tools")])
def test_every_setting_of_the_environment_is_in_its_hash(path: str) -> None:
    config = load_config(None, [changed(Env(), path)])
    assert config != Config()
    assert env_hash(config.env) != env_hash(Env())


@pytest.mark.parametrize("name", SWITCHES)
def test_every_mechanism_is_in_the_hash_and_has_a_switch_of_its_own(name: Any) -> None:
    base = load_config(None, ["env.rendering.order=transcript"])
    on = base.env.has(name)
    override = f"env.{'.'.join(SWITCHES[name])}={str(not on).lower()}"
    config = load_config(None, ["env.rendering.order=transcript", override])
    assert config.env == base.env.switch(**{name: not on}) != base.env
    assert env_hash(config.env) != env_hash(base.env)
    path, ours, theirs = next(differences(public_config(config), public_config(base)))
    assert (path, ours, theirs) == (override.partition("=")[0], not on, on)


def test_earlier_settings_are_read_in_files_overrides_and_records_and_stay_in_hashes(tmp_path: Path) -> None:
    file = tmp_path / "earlier.toml"
    file.write_text("[env.grep]\non = false\n[env.pruning]\ntokens = 500\n[rl]\nratio_min = 0.5\n")
    config = load_config(file, ["env.curation.tags=false", "env.grep.on=true", "rl.ratio_max=3"])
    assert config.env.mechanisms == Env().switch(tags=False).mechanisms
    assert (config.env.pruning.limits, config.rl.ratio) == ((500, 24326), (0.5, 3.0))
    recorded = to_record(config, "")
    assert recorded["env"]["pruning"]["tokens"] == 500
    assert recorded["rl"]["ratio_max"] == 3.0
    recorded["env"] = config.env.plain()
    assert recorded["env"]["curation"]["tags"] is False
    assert msgspec.convert(present_tree(recorded), Config) == config


@pytest.mark.parametrize("path", ["recipe", *TERMS])
def test_every_weight_is_in_the_reward_hash(path: str) -> None:
    new = "robust" if path == "recipe" else 0.01
    assert load_config(None, [f"reward.{path}={new}"]).reward_hash != Config().reward_hash


def test_the_fitted_weights_are_in_the_hash_where_evidence_is_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked, plain = load_config().env, load_config(None, ["env.evidence.rank=false"]).env
    before = env_hash(ranked), env_hash(plain)
    weights = msgspec.structs.replace(FITTED.terms, link=FITTED.terms.link + 0.01)
    monkeypatch.setattr(environment, "FITTED", msgspec.structs.replace(FITTED, terms=weights))
    assert env_hash(ranked) != before[0]
    assert env_hash(plain) == before[1]


def test_how_work_is_carried_out_is_in_no_hash() -> None:
    work = ("workers=3", "attempts=9", "call_deadline_s=1.5", "concurrency=1")
    assert config_hashes(load_config(None, [f"machine.{each}" for each in work])) == config_hashes(Config())


def test_the_hash_of_all_decisive_settings_outlives_the_name_of_the_machine() -> None:
    """Recorded in provenance files since the section was called `run`."""
    to_record = "49c1cb4654504649ddab6b81962689da9b05acefb0a09c64ecd5ad3d10aec84b"
    assert load_config(PAPER, ["machine.workers=3"]).hash == load_config(PAPER).hash == to_record
    assert load_config(PAPER, ["env.max_turns=9"]).hash != to_record
    ranked = "05a2b26b9cf1fd43552cb2f3bfb7fb77e6040c8bd91108c1dc9b237dd27b8597"
    unmarked = "env.rendering.marks=false"
    assert load_config(None, ["machine.workers=3", unmarked]).hash == load_config(None, [unmarked]).hash == ranked
    assert load_config(None, ["env.max_turns=9", unmarked]).hash != ranked
    assert load_config(None, ["train.lora.layers=9", unmarked]).hash != ranked


def test_every_setting_is_read_somewhere() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "harness1").rglob("*.py"))
    paths = [path for path, _ in leaves(Config())]
    names = [path.split(".")[-1] for path in paths]
    # A name that several groups use must be read through its group.
    words = [
        path.split(".")[-2:] if names.count(path.split(".")[-1]) > 1 else ["", name]
        for path, name in zip(paths, names, strict=True)
    ]
    unread = [
        path
        for path, (group, name) in zip(paths, words, strict=True)
        if not re.search(rf"({group}|settings)\.{name}\b", source)
    ]
    assert unread == []


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("env.max_turnz=3", ": env: there is no setting max_turnz; did you mean env.max_turns?"),
        ("reward.outcom=1", "did you mean reward.outcome?"),
        ("env.evidnce.rank=true", "did you mean env.evidence?"),
        ("envv.max_turns=4", "did you mean env?"),
        ("env.grep.onn=false", "did you mean env.grep.on?"),
        ("env.curation.tag=true", "did you mean env.curation.tags?"),
        ("machine.price=[inf, 0, 0]", "machine.price.0 must be a finite number"),
        ("colour=3", "configuration: there is no setting colour"),
        ("env.max_turns=many", "configuration: env.max_turns: expected int, got str"),
        ("env.max_turns=0", ">= 1"),
        ("env.curation.cap=31", "<= 30"),
        ("env.curation.eviction=lru", "lru"),
        ("data.near=1.5", "<= 1.0"),
        ("env.dedup.on=1", "bool"),
        ("env.search=false", "object"),
        ("env.max_turns", "a.b=value"),
        ("env..max_turns=1", "a.b=value"),
        ("env.generation_reserve=32768", "smaller than env.context_window"),
        ("env.rendering.recent_max=4", "env.rendering.window"),
        ("env.pruning.on=true", "env.rendering.order=transcript"),
        ('env.mechanisms=["grepp"]', "grepp"),
        ("rl.ratio=[6, 5]", "rl.ratio"),
        ("run.workers=2", "[run] is called [machine] now"),
        ("reward={recipe = 'robst', beta = 2.0}", "reward.recipe: invalid enum value 'robst'"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name(override: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        load_config(None, [override])


def test_a_file_overlays_defaults_and_overrides_overlay_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('[env]\nmax_turns = 7\nguidance = "none"\n[env.search]\nhits = 3\n')
    config = load_config(path, ["env.max_turns=8", "env.search.tokens = 99", "env.rendering.order=epoch"])
    assert (config.env.max_turns, config.env.guidance, config.env.search.hits) == (8, "none", 3)
    assert (config.env.search.tokens, config.env.rendering.order) == (99, "epoch")
    assert load_config(None, ["env.max_turns=8", "env.max_turns=9"]).env.max_turns == 9
    with pytest.raises(ConfigError, match="not a group"):
        load_config(path, ["env.max_turns.x=1"])


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("[env\n")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(broken)


def test_the_prompt_limit_is_the_window_without_the_reserve() -> None:
    assert Env().prompt_limit == 30_720
    assert Env(context_window=1000, generation_reserve=100).observation_limit(4096) == 360


def test_a_recorded_configuration_is_without_the_mechanisms_that_it_does_not_mention() -> None:
    recorded = msgspec.to_builtins(Config()) | {"env": Env().plain()}
    for group, name in (("evidence", "rank"), ("auto_populate", "by"), ("read", "by"), ("rendering", "marks")):
        del recorded["env"][group][name]
    del recorded["env"]["leads"]
    paper = load_config(PAPER)
    assert msgspec.convert(present_tree(recorded), Config).env.to_hash() == paper.env.to_hash()
    assert msgspec.convert(present_tree(msgspec.to_builtins(Config())), Config) == Config()


@pytest.mark.parametrize("override", ["zzzqqq=1", "index.zz=1", "env.on=1"])
def test_a_setting_like_no_other_is_answered_without_a_guess(override: str) -> None:
    with pytest.raises(ConfigError, match="there is no setting") as caught:
        load_config(None, [override])
    assert "did you mean" not in str(caught.value)


def test_what_the_source_says_of_settings_stands_above_them_and_is_read_back_as_nothing(tmp_path: Path) -> None:
    config = load_config(None, ["env.max_turns=4"])
    told = notes(Config)
    lines = toml_lines(public_config(config), told)
    assert lines[lines.index("context_window = 32768") - 1] == "# Tokens of prompt and output together."
    assert lines[lines.index("[env.search]") - 1] == "# The limits of one search query."
    (tmp_path / "shown.toml").write_text("\n".join(lines))
    assert (tmp_path / "shown.toml").stat().st_size < LONGEST / 2
    assert load_config(tmp_path / "shown.toml") == config


def test_every_group_and_every_setting_says_what_it_decides() -> None:
    there = {path for path, _ in leaves(Config())}
    groups = {path.rsplit(".", depth)[0] for path in there for depth in range(1, path.count(".") + 1)}
    assert there | groups == set(notes(Config))


@pytest.mark.parametrize("path", [path for path, removed in REMOVED.items() if removed.default is not None])
def test_a_removed_setting_is_read_at_its_last_default_and_refused_otherwise(path: str) -> None:
    default, reason = REMOVED[path].default_in({}), REMOVED[path].reason
    assert load_config(None, [f"{path}={msgspec.json.encode(default).decode()}"]) == load_config()
    changed = {bool: not default, str: "other", list: ["other"]}
    other = changed.get(type(default)) if type(default) in changed else default + 1
    with pytest.raises(ConfigError, match=re.escape(f"{path} was removed: {reason}")):
        load_config(None, [f"{path}={msgspec.json.encode(other).decode()}"])


def test_steps_are_taken_at_the_last_defaults_that_hashes_count() -> None:
    used = {"clip": trainer.CLIP, "weight_decay": trainer.DECAY, "epsilon": trainer.EPSILON}
    used |= {"beta1": trainer.BETAS[0], "beta2": trainer.BETAS[1]}
    assert used == {name: REMOVED[f"train.{name}"].default for name in used}


def test_a_setting_that_decides_nothing_any_more_is_read_at_any_value() -> None:
    assert load_config(None, ["machine.model.rows=32"]) == load_config()


@pytest.mark.parametrize(("concurrency", "slots"), [(1, 1), (8, 8), (256, 64)])
def test_a_model_decodes_the_calls_of_the_episodes_in_flight_up_to_a_bound(concurrency: int, slots: int) -> None:
    assert load_config(None, [f"machine.concurrency={concurrency}"]).machine.slots == slots


@pytest.mark.parametrize("override", ["env.verification.judge=fitted", "index.dense.search=ivf"])
def test_a_removed_value_of_a_setting_is_refused_with_its_reason_and_read_in_records(override: str) -> None:
    with pytest.raises(ConfigError, match=rf"{override} was removed: (it found|nothing)"):
        load_config(None, [override])
    section, group, name, value = re.split(r"[.=]", override)
    recorded = msgspec.to_builtins(Config())
    recorded[section][group][name] = value
    assert msgspec.convert(present_tree(recorded), Config) == Config()


def test_records_are_read_without_removed_settings_and_hashed_with_them() -> None:
    assert present_tree({"rl": {"anchors": 0.5, "kl": 0.1, "gate": {}}, "run": {}}) == {"rl": {}, "machine": {}}
    full = to_record(Config(), "")
    assert full["env"]["retrieval"]["rerank"] == {"on": False, "candidates": 50}
    full["env"] = Env().plain()
    assert msgspec.convert(present_tree(full), Config) == Config()
    assert Env().plain()["dedup"]["threshold"] == 0.85


def test_the_description_of_an_index_is_read_without_removed_settings() -> None:
    class Description(msgspec.Struct):
        settings: Index

    recorded_by_an_earlier_version = {"settings": to_record(Index(), "index.")}
    assert recorded_by_an_earlier_version["settings"]["dense"]["hnsw_links"] == 32
    assert read_index_description(msgspec.json.encode(recorded_by_an_earlier_version), Description).settings == Index()
    with pytest.raises(ConfigError, match=r"index\.dense\.ivf_probes was removed"):
        read_index_description('{"settings": {"dense": {"ivf_probes": 9}}}', Description)


def test_an_override_of_a_reward_term_prevails_over_a_file_in_either_spelling(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    for text in ("[reward]\noutcome = 0.7\n", "[reward.weights]\noutcome = 0.7\n"):
        file.write_text(text)
        for name in ("reward.outcome", "reward.weights.outcome"):
            assert load_config(file, [f"{name}=0.5"]).reward.weights["outcome"] == 0.5


def test_a_recorded_reward_keeps_the_weights_that_it_was_made_with() -> None:
    config = Config(reward=Reward(weights={"outcome": 1.0}))
    found = msgspec.convert(present_tree(msgspec.to_builtins(config)), Config)
    assert found.reward_hash == config.reward_hash


def test_recorded_prices_of_before_are_read() -> None:
    recorded = {"run": {"price": {"prompt": 2.0, "cached": 0.5, "output": 8.0}}}
    assert present_tree(recorded)["machine"]["price"] == [2.0, 0.5, 8.0]
