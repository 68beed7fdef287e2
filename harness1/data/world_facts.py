"""The fact table of a synthetic world: entities of nine kinds with invented names, linked by relations."""

from __future__ import annotations

import math
import random
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

T = TypeVar("T")

ONSETS = ("B", "Br", "D", "Dr", "F", "Fl", "G", "Gr", "H", "J", "K", "Kl", "Kr", "L", "M", "N", "P", "Pr", "R", "S",
          "Sk", "Sl", "St", "T", "Tr", "V", "W", "Z", "Š", "Č", "Th", "Qu", "Ł")  # fmt: skip
VOWELS = ("a", "e", "i", "o", "u", "a", "e", "i", "o", "ei", "au", "é", "ö", "å", "ía")
CODAS = ("l", "n", "r", "s", "m", "k", "nd", "rn", "v", "ñ", "t", "ss")
LINKS = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z", "st", "br", "dr", "š")
SOFT_CODAS = ("l", "n", "r", "s", "m", "", "")
ENDINGS = ("a", "en", "or", "is", "um", "o", "ek", "ay", "in", "ard", "ow", "el", "ik", "ova", "ens", "ö", "mark", "by")
FEMALE, MALE = ("a", "ine", "isa", "ette", "ía", "inka"), ("o", "an", "ek", "us", "ard", "ö")
PARTICLES = ("van", "de", "von", "van der", "del", "af")
TRADES = ("Systems", "Holdings", "Instruments", "Works", "Logistics", "Group", "Optics", "Maritime", "Foods", "& Sons",
          "Biologics", "Energy", "Textiles", "Robotics", "Paper Mills", "Glass", "Shipping Lines")  # fmt: skip
FIELDS = ("Glaciology", "Applied Optics", "Marine Biology", "Metallurgy", "Linguistics", "Soil Science", "Acoustics",
          "Hydraulics", "Astronomy", "Crop Genetics", "Public Health", "Printing Arts")  # fmt: skip
ADJECTIVES = ("Silent", "Crooked", "Amber", "Distant", "Second", "Borrowed", "Hollow", "Patient", "Northern", "Paper",
              "Unwritten", "Salted", "Velvet", "Last", "Burning", "Forgotten", "Narrow", "Blue", "Seventh")  # fmt: skip
NOUNS = ("Harbour", "Orchard", "Lantern", "Winter", "Bridge", "Archive", "Sparrow", "Compass", "Quarry", "Letter",
         "Lighthouse", "Ferry", "Garden", "Clock", "Tide", "Violin", "Frontier", "Staircase", "Meadow")  # fmt: skip
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def below(rng: random.Random, limit: int) -> int:
    """Return a whole number in [0, limit). Only `random()` promises the same numbers on every version of Python."""
    return int(rng.random() * limit)


def pick(rng: random.Random, options: Sequence[T]) -> T:
    """Return one of the options, each equally likely."""
    return options[below(rng, len(options))]


def fold(name: str) -> str:
    """Return a name as careless readers see it: without case and accents."""
    plain = unicodedata.normalize("NFKD", name)
    return "".join(letter for letter in plain if not unicodedata.combining(letter)).casefold()


def _stem(rng: random.Random) -> str:
    """Return a word of two or three syllables, such as "Velmark"."""
    inner = pick(rng, LINKS) + pick(rng, VOWELS) if rng.random() < 0.5 else ""
    return pick(rng, ONSETS) + pick(rng, VOWELS) + pick(rng, SOFT_CODAS) + inner + pick(rng, LINKS) + pick(rng, ENDINGS)


Kind = Literal["person", "company", "filing", "patent", "town", "river", "institute", "film", "book"]
SHARES: dict[Kind, float] = {
    "company": 0.16, "filing": 0.16, "patent": 0.09, "town": 0.11, "river": 0.04, "institute": 0.04, "film": 0.05,
    "book": 0.05, "person": 0.30,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entity:
    """One thing of the world. `facts` maps a relation to the index of another entity, or to a plain value. `style`
    seeds the wording of its document, which it shares with its look-alike, `model`."""

    index: int
    kind: Kind
    name: str
    title: str
    style: str
    facts: dict[str, int | str]
    model: int | None = None


def deal(rng: random.Random, pool: Sequence[int]) -> Iterator[int]:
    """Yield the pool in a scattered order, again and again, so that every member is dealt equally often."""
    if not pool:
        return
    step = coprime(rng, len(pool))
    at = below(rng, len(pool))
    while True:
        yield pool[at % len(pool)]
        at += step


def coprime(rng: random.Random, count: int) -> int:
    """Return a number in [1, count] that shares no divisor with `count`."""
    step = 1 + below(rng, count)
    while math.gcd(step, count) != 1:
        step = step % count + 1
    return step


def kind_ranges(count: int) -> dict[Kind, range]:
    """Return the indices of each kind of entity; people take what the others leave."""
    ranges: dict[Kind, range] = {}
    start = 0
    for kind, share in SHARES.items():
        size = count - start if kind == "person" else max(1 if kind != "town" else 2, int(count * share))
        ranges[kind] = range(start, start + size)
        start += size
    return ranges


PERIODS = ("annual", "first-quarter", "second-quarter", "third-quarter")
INVENTIONS = ("rotary seal", "folding mast", "optical relay", "grain dryer", "tidal valve", "paper sensor",
              "cable brake", "heat exchanger", "loom shuttle", "ice drill", "sound damper", "lens mount")  # fmt: skip
USES = ("cold pumps", "small ferries", "tall chimneys", "deep wells", "night trains", "greenhouses", "pipe organs")
SEXES = ("she", "he")


class Casting:
    """Invents the entities of a world, without relations. Names differ by more than case and accents."""

    def __init__(self, ranges: dict[Kind, range], seed: int) -> None:
        self.seed, self.ranges, self.taken = seed, ranges, set[str]()
        rng = random.Random(f"world/{seed}/lists")
        self.surnames = [_stem(rng) for _ in range(max(4, len(ranges["person"]) // 4))]
        self.regions = [_stem(rng) for _ in range(max(2, len(ranges["town"]) // 12))]
        firsts = max(6, min(500, len(ranges["person"]) // 8))
        endings = {"she": FEMALE, "he": MALE}
        starts = (ONSETS, VOWELS, CODAS)
        self.firsts = {
            sex: ["".join(pick(rng, part) for part in (*starts, endings[sex])) for _ in range(firsts)] for sex in SEXES
        }
        self.entities: list[Entity] = []
        for kind, indices in ranges.items():
            rng = random.Random(f"world/{seed}/{kind}")
            for index in indices:
                previous = self.entities[-1] if self.entities and self.entities[-1].kind == kind else None
                self.entities.append(self._entity(rng, kind, index, previous))

    def _claim(self, name: str) -> bool:
        """Take a name, and return whether it was free."""
        key, before = fold(name), len(self.taken)
        self.taken.add(key)
        return len(self.taken) > before

    def _entity(self, rng: random.Random, kind: Kind, index: int, previous: Entity | None) -> Entity:
        style = f"world/{self.seed}/prose/{index}"
        if kind == "filing":
            return self._filing(rng, index, style, previous)
        if kind == "patent":
            return self._patent(rng, index, style, previous)
        facts: dict[str, int | str] = {"pronoun": pick(rng, SEXES)} if kind == "person" else {}
        while True:
            name = self._name(rng, kind, previous, facts)
            if self._claim(name):
                return Entity(index, kind, name, name, style, facts)

    def _name(self, rng: random.Random, kind: Kind, previous: Entity | None, facts: dict[str, int | str]) -> str:
        model = previous.name if previous is not None and rng.random() < 0.15 else None
        if kind == "person":
            first = pick(rng, self.firsts[str(facts["pronoun"])])
            form, surname = rng.random(), pick(rng, self.surnames)
            if form < 0.08:
                return f"{first} {surname}-{pick(rng, self.surnames)}"
            if form < 0.16:
                return f"{first} {pick(rng, PARTICLES)} {surname}"
            return f"{first} {pick(rng, LETTERS)}. {surname}" if form < 0.26 else f"{first} {surname}"
        if kind == "company" and model is None:  # a word, now and then an acronym, and a trade
            root = "".join(pick(rng, LETTERS) for _ in range(4)) if rng.random() < 0.1 else _stem(rng)
            return f"{root} {pick(rng, TRADES)}"
        if kind == "company" and model:  # a word or letter away from another
            root, _, trade = model.partition(" ")
            if rng.random() < 0.5:
                return f"{root} {pick(rng, TRADES)}"
            at = 1 + below(rng, len(root) - 1)
            letter = pick(rng, LETTERS)
            return f"{root[:at]}{letter if root.isupper() else letter.lower()}{root[at + 1 :]} {trade}"
        if kind == "town":
            return f"{model.partition(',')[0] if model else _stem(rng)}, {pick(rng, self.regions)}"
        if kind == "river":
            return f"River {_stem(rng)}"
        if kind == "institute":
            root, field = _stem(rng), pick(rng, FIELDS)
            return pick(rng, (f"{root} Institute of {field}", f"{root} Academy of {field}", f"University of {root}"))
        adjective, noun, root = pick(rng, ADJECTIVES), pick(rng, NOUNS), _stem(rng)
        forms = (f"The {adjective} {noun} of {root}", f"A {noun} for {root}", f"{root} or a {adjective} {noun}",
                 f"{adjective} {noun}", f"The {noun} at {root}")  # fmt: skip
        return pick(rng, forms)

    def _filing(self, rng: random.Random, index: int, style: str, previous: Entity | None) -> Entity:
        """Return a report. Two of three follow the one before: the same company and wording, another period."""
        company, model = pick(rng, self.ranges["company"]), None
        if previous and rng.random() < 0.66:
            company, model = int(previous.facts["filed_by"]), previous
        while True:
            period = f"{1996 + below(rng, 28)} {pick(rng, PERIODS)}"
            name = f"{period} report of {self.entities[company].name}"
            if self._claim(name):
                break
            company, model = pick(rng, self.ranges["company"]), None
        facts: dict[str, int | str] = {"filed_by": company, "period": period}
        if model:
            return Entity(index, "filing", name, name, model.style, facts, model.index)
        return Entity(index, "filing", name, name, style, facts)

    def _patent(self, rng: random.Random, index: int, style: str, previous: Entity | None) -> Entity:
        """Return a patent. Two of five continue the one before: they differ in number, and in year or an objection."""
        number = f"patent KX{4_000_000 + index * 7 + below(rng, 7)}"
        self._claim(number)
        if previous and previous.model is None and rng.random() < 0.4:
            return Entity(index, "patent", number, previous.title, previous.style, {}, previous.index)
        title = f"{_stem(rng)} {pick(rng, INVENTIONS)} for {pick(rng, USES)}"
        return Entity(index, "patent", number, title, style, {})


AMOUNTS = 400  # distinct sums of money in the whole world: few, so that many filings state the same amount


def link_entities(entities: list[Entity], ranges: dict[Kind, range], seed: int) -> None:
    """Fill in the facts of all entities. The objects of a relation are dealt evenly, so that no name is everywhere."""
    table = _Table(entities, ranges, seed)
    _link_people_and_papers(table)
    _link_places_and_works(table)


@dataclass
class _Table:
    entities: list[Entity]
    ranges: dict[Kind, range]
    seed: int
    rng: random.Random = field(default_factory=random.Random)

    def begin(self, kind: Kind) -> range:
        """Return the entities of a kind, whose facts have random numbers of their own."""
        self.rng = random.Random(f"world/{self.seed}/{kind} facts")
        return self.ranges[kind]

    def link(self, relation: str, subjects: Sequence[int], kind: Kind | Sequence[int], share: float = 1.0) -> None:
        """Give a share of the subjects the relation to members of a kind, dealt evenly, never to itself."""
        dealt = deal(self.rng, self.ranges[kind] if isinstance(kind, str) else kind)
        for subject in subjects:
            if self.rng.random() < share and (target := next(dealt, subject)) != subject:
                self.entities[subject].facts[relation] = target

    def value(self, relation: str, subjects: Sequence[int], draw: Callable[[], str]) -> None:
        for subject in subjects:
            self.entities[subject].facts[relation] = draw()

    def number(self, relation: str, subjects: Sequence[int], least: int, limit: int, form: str = "{}") -> None:
        self.value(relation, subjects, lambda: form.format(least + below(self.rng, limit)))


def _link_people_and_papers(world: _Table) -> None:
    people = world.begin("person")
    generations = [people[0::3], people[1::3], people[2::3]]  # mothers and advisers are older
    for age, members in enumerate(generations):
        world.number("born_year", members, 1880 + 33 * age, 16)
        if age:
            women = [i for i in generations[age - 1] if world.entities[i].facts["pronoun"] == "she"]
            world.link("mother", members, women, 0.6)
            world.link("adviser", members, generations[age - 1], 0.4)
    world.link("born_in", people, "town")
    world.link("educated_at", people, "institute", 0.5)
    companies = world.begin("company")
    world.link("founder", companies, "person")
    world.link("headquartered_in", companies, "town")
    world.link("acquired_by", companies[0::2], companies, 0.6)
    world.link("successor", companies[1::4], companies, 0.6)
    world.number("founded_year", companies, 1900, 95)
    filings = world.begin("filing")
    world.link("signed_by", filings, "person")
    tenths = sorted(below(world.rng, 9000) + 30 for _ in range(AMOUNTS))
    amounts = [f"{tenth / 10:.1f} million crowns" for tenth in tenths]
    world.value("revenue", filings, lambda: pick(world.rng, amounts[AMOUNTS // 4 :]))
    world.value("profit", filings, lambda: pick(world.rng, amounts[: AMOUNTS // 4]))
    world.number("employees", filings, 120, 8800, "{:,}")
    for facts, model in ((world.entities[index].facts, world.entities[index].model) for index in filings):
        if model is not None:
            facts["signed_by"] = world.entities[model].facts["signed_by"]
    patents = world.begin("patent")
    world.link("inventor", patents, "person")
    world.link("assignee", patents, "company")
    world.number("filed_year", patents, 1950, 65)
    world.value("objection", patents, lambda: "did")
    for facts, model in ((world.entities[index].facts, world.entities[index].model) for index in patents):
        if model is not None:
            year = str(int(str(world.entities[model].facts["filed_year"])) + 1)
            facts.update(world.entities[model].facts)
            facts.update({"filed_year": year} if world.rng.random() < 0.5 else {"objection": "did not"})


def _link_places_and_works(world: _Table) -> None:
    towns, rivers, institutes = world.begin("town"), world.ranges["river"], world.ranges["institute"]
    world.link("river", towns, rivers)
    world.link("mayor", towns, "person", 0.7)
    world.number("population", towns, 1000, 80_000, "{:,}")
    world.number("length", rivers, 30, 700, "{} kilometres")
    world.value("source", rivers, lambda: f"the {_stem(world.rng)} Hills")
    for position, river in enumerate(rivers):
        if position and world.rng.random() < 0.8:
            world.entities[river].facts["flows_into"] = rivers[below(world.rng, position)]
    world.link("located_in", institutes, towns)
    world.link("director", institutes, "person")
    world.number("opened_year", institutes, 1820, 150)
    films, books = world.begin("film"), world.ranges["book"]
    world.link("film_director", films, "person")
    world.link("composer", films, "person", 0.8)
    world.link("based_on", films, books, 0.6)
    world.link("filmed_in", films, "town")
    world.number("release_year", films, 1935, 85)
    world.link("author", books, "person")
    world.link("publisher", books, "company")
    world.number("published_year", books, 1905, 110)
