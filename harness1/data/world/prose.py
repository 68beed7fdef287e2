"""Writes documents about entities: every fact in one of several phrasings, among true detail that answers no question.

In a template `{s}` is the entity as a subject (its name, or "she", or "the company"), `{n}` its full name and `{o}`
what the relation points to. Questions use other words for the same relations (see `questions`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from harness1.data.world.facts import Entity, Kind
from harness1.data.world.names import below, pick

STATEMENTS: dict[str, tuple[str, ...]] = {
    "born_year": ("Records put the birth of {n} in {o}.", "{s} first saw daylight in {o}."),
    "born_in": ("{s} was a native of {o}.", "{s} came into the world in {o}, above a bakery.",
                "A plaque in {o} marks the house where the life of {n} began."),
    "mother": ("{o} gave birth to {them} during a hard winter.", "{s} was the {child} of {o}, a woman of few words.",
               "{o}, who bore {them} late in life, outlived most of the family."),
    "adviser": ("{o} supervised the dissertation that {s} handed in.", "The thesis of {n} was guided by {o}.",
                "{s} wrote a thesis under the eye of {o}."),
    "educated_at": ("{s} took a degree at the {o}.", "The {o} counts {n} among its graduates.",
                    "{s} spent four years as a student of the {o}."),
    "founder": ("{o} set the firm up with borrowed money.", "{n} goes back to {o}, who opened its first workshop.",
                "The business was started by {o} in a rented hall."),
    "headquartered_in": ("The head office stands in {o}.", "{s} is run from {o}.",
                         "The directors of {n} meet in {o}, where the main offices are."),
    "acquired_by": ("{s} was bought by {o} after a short auction.", "{o} took {n} over and kept the brand.",
                    "Control passed to {o}, which paid in shares."),
    "successor": ("After a reorganisation its trade was carried on by {o}.", "{o} inherited the order book of {n}."),
    "founded_year": ("{s} has traded since {o}.", "The trade register lists {n} from {o} onwards."),
    "filed_by": ("The document was handed to the registry by {o}.", "It covers the business of {o} and its branches."),
    "revenue": ("Turnover came to {o}.", "Sales of {o} were booked in the period."),
    "profit": ("After tax {o} remained.", "The bottom line shows {o} after all charges."),
    "employees": ("At the end of the period {o} people were on the payroll.", "The staff numbered {o} at the close."),
    "signed_by": ("{o} put a signature to the accounts.", "The accounts carry the signature of {o}."),
    "inventor": ("The idea was worked out by {o} over two winters.", "{o} devised the mechanism and drew the figures."),
    "assignee": ("All rights belong to {o}.", "The rights were made over to {o}, which paid the fees."),
    "filed_year": ("The application reached the office in {o}.", "Papers were lodged in {o}."),
    "objection": ("The examiner {o} object to the broadest claim.", "A competitor {o} contest the grant."),
    "river": ("The {o} runs through the middle of the place.", "{s} lies on both banks of the {o}."),
    "mayor": ("{o} was elected to lead the council.", "The town hall is in the charge of {o}."),
    "population": ("The last census counted {o} inhabitants.", "Some {o} people live here."),
    "length": ("From end to end {s} measures {o}.", "{s} winds along for {o}."),
    "source": ("{s} springs up in {o}.", "Its first trickle leaves {o} under a mill."),
    "flows_into": ("Below the last weir {s} joins the {o}.", "Its waters end in the {o}."),
    "located_in": ("Its buildings stand in {o}.", "The campus of the {n} lies in {o}."),
    "director": ("{o} heads the staff.", "The work is led by {o}, who came from industry."),
    "opened_year": ("The doors opened in {o}.", "Teaching began in {o}."),
    "film_director": ("{o} was in charge on the set.", "{o} made the picture in eleven weeks."),
    "composer": ("{o} wrote the score.", "The songs and the score are by {o}."),
    "based_on": ("The script follows {o}, a novel.", "Its plot is taken from the novel {o}."),
    "filmed_in": ("Most scenes were shot in {o}.", "The crew spent a summer with its cameras in {o}."),
    "release_year": ("It reached the cinemas in {o}.", "The first showing took place in {o}."),
    "author": ("{o} wrote it at a kitchen table.", "It came from the pen of {o}."),
    "publisher": ("{o} brought it out in cloth.", "The first printing was paid for by {o}."),
    "published_year": ("Copies were on sale from {o}.", "The first edition is dated {o}."),
}  # fmt: skip

OPENINGS: dict[Kind, tuple[str, ...]] = {
    "person": ("{n} made a name in several trades, and letters addressed to {n} are kept in a public archive.",
               "{n} is remembered for steady work; a short life of {n} was printed by a local society."),
    "company": ("{n} is a firm of middling size, and the sign of {n} is still seen on old crates.",
                "{n} makes and sells goods for the trade; invoices of {n} are prized by collectors."),
    "filing": ("This is the {n}, set in the form that the registry asks for.",
               "The {n} follows the usual form and was laid open for inspection."),
    "patent": ("As {n} this {t} was entered in the rolls, and it is described here in the words of the office.",
               "Under {n} the office protects a {t}, which is described here for the trade."),
    "town": ("{n} is a market town, and the road to {n} is lined with poplars.",
             "{n} grew around a crossing; old maps show {n} within a wall."),
    "river": ("The {n} crosses flat country, and barges have used the {n} since the age of sail.",
              "The {n} is a slow stream; mills stood along the {n} for centuries."),
    "institute": ("The {n} is a place of learning, and the library of the {n} may be used by anyone.",
                  "The {n} trains students and does research; the {n} also lends instruments."),
    "film": ("{n} is a feature film, and a worn print of {n} survives in an archive.",
             "{n} was made on a small budget; posters of {n} now cost a good deal."),
    "book": ("{n} is a novel in three parts, and a signed copy of {n} lies in a museum.",
             "{n} tells of a family over forty years; students still read {n} aloud."),
}  # fmt: skip

DETAILS: dict[Kind, tuple[str, ...]] = {
    "person": ("{s} spent two summers in {town}, which {s} disliked.",
               "Contrary to what is often said, {s} was not a native of {town}.",
               "In {year} {s} gave away a collection of {count} stamps, but kept the albums.",
               "A prize worth {amount} went to a rival in {year}, which caused a quarrel.",
               "{s} kept bees, rowed on Sundays, and never learned to drive a car.",
               "Friends recalled a quick temper and a habit of walking while thinking.",
               "A portrait was hung in {year} and taken down {small} years later for cleaning."),
    "company": ("In {year} a fire destroyed {count} square metres of storage, which was rebuilt in brick.",
                "A branch in {town} was closed in {year} without a strike.",
                "It never paid a dividend above {small} per cent, but it never missed one.",
                "The firm once bid {amount} for a rival and was turned down.",
                "Its catalogue ran to {count} articles, among them a popular kind of hinge.",
                "A plan to move to {town} was dropped, and the directors did not return to it."),
    "filing": ("Stocks were valued at cost, which was {amount} lower than the year before.",
               "A claim for {amount} is disputed and has not been provided for.",
               "Travel and fuel took {small} per cent of all costs, while rents were unchanged.",
               "A loan of {amount} falls due in {year} and will be renewed.",
               "The branch in {town} was written down, but no plant was sold.",
               "The accounts were not restated, and the auditors raised no doubts."),
    "patent": ("A sleeve of soft bronze is held by {small} pins, which are drawn when the part is worn.",
               "Earlier devices needed {small} bearings and failed in frost.",
               "The drawings show a trial piece that was tested in {town} on a borrowed bench.",
               "The saving was put at {amount} for a works of common size.",
               "The part is cast whole, but it may also be milled from bar stock.",
               "In trials it ran for {count} hours until the oil was spent."),
    "town": ("A fire in {year} spared only the grain store and {small} houses.",
             "The market is held on Thursdays, and the fair of {year} is still talked about.",
             "A railway to {town} was planned in {year} but not built.",
             "The bridge cost {amount}, which took a generation to pay.",
             "Its football club has won the regional cup {small} times.",
             "The museum keeps {count} clay pipes and a stuffed bear."),
    "river": ("The flood of {year} carried off {small} bridges and a chapel.",
              "Otters came back in {year}, after the tannery was shut.",
              "A canal towards {town} was begun and given up.",
              "Dredging cost {amount}, which the boatmen had to pay.",
              "Anglers count {small} kinds of fish between the locks.",
              "It freezes in most winters, but skating on it is not allowed."),
    "institute": ("Its library holds {count} volumes, which are open on weekdays.",
                  "A gift of {amount} in {year} paid for the north wing.",
                  "A field station near {town} was given up in {year}.",
                  "About {small} in a hundred applicants are admitted.",
                  "The annual lecture is free, but seats must be booked.",
                  "Its press prints a journal that appears {small} times a year."),
    "film": ("It earned {amount} at home and little abroad.",
             "A fire on the set in {year} cost {small} days of work.",
             "A scene set in {town} was cut, but the script survives.",
             "The negative was restored from {small} prints, none of them complete.",
             "Critics praised the light and not the dialogue.",
             "About {count} extras were hired, most of them students."),
    "book": ("The first run of {count} copies was gone within {small} weeks.",
             "A chapter set in {town} was left out of later editions.",
             "A manuscript was auctioned in {year} for {amount}, which surprised the family.",
             "Reviewers found it long, but readers did not mind.",
             "It has been translated into {small} languages, twice into Danish.",
             "The cover shows a gate that does not exist."),
}  # fmt: skip

NOUNS: dict[Kind, str] = {
    "company": "the company", "filing": "the report", "patent": "the invention", "town": "the town",
    "river": "the river", "institute": "the institute", "film": "the film", "book": "the novel",
}  # fmt: skip
UNSTATED = {"pronoun", "period"}
SWAPS = {"the": "this", "which": "that", "but": "yet", "and": "plus", "while": "whilst", "until": "till",
         "among": "amongst", "within": "inside"}  # fmt: skip


def compose(entity: Entity, entities: Sequence[Entity], towns: range) -> str:
    """Write the document of an entity: an opening, its facts in any order, and two to four sentences of detail."""
    rng = random.Random(entity.style)
    sentences = [_state(rng, entity, relation, entities) for relation in entity.facts if relation not in UNSTATED]
    pool = list(DETAILS[entity.kind])
    for _ in range(2 + below(rng, 3)):
        detail = pool.pop(below(rng, len(pool)))
        sentences.append(_fill(detail, entity, _subject(rng, entity), "", _asides(rng, entities, towns)))
    opening = _fill(pick(rng, OPENINGS[entity.kind]), entity, entity.name, "", {})
    return " ".join([opening, *_shuffled(rng, sentences)])


def _state(rng: random.Random, entity: Entity, relation: str, entities: Sequence[Entity]) -> str:
    target = entity.facts[relation]
    shown = entities[target].name if isinstance(target, int) else target
    return _fill(pick(rng, STATEMENTS[relation]), entity, _subject(rng, entity), shown, {})


def _subject(rng: random.Random, entity: Entity) -> str:
    """Return the subject of a sentence: the full name once in three times."""
    short = str(entity.facts["pronoun"]) if entity.kind == "person" else NOUNS[entity.kind]
    full = f"the {entity.name}" if entity.kind in ("filing", "river", "institute") else entity.name
    return full if rng.random() < 0.33 else short


def _fill(template: str, entity: Entity, subject: str, shown: str, asides: dict[str, str]) -> str:
    female = entity.facts.get("pronoun") == "she"
    text = template.format(s=subject, n=entity.name, o=shown, t=entity.title, them="her" if female else "him",
                           child="daughter" if female else "son", **asides)  # fmt: skip
    return text[0].upper() + text[1:]


def _asides(rng: random.Random, entities: Sequence[Entity], towns: range) -> dict[str, str]:
    return {
        "year": str(1890 + below(rng, 130)),
        "amount": f"{below(rng, 900) / 10 + 3:.1f} million crowns",
        "count": f"{110 + below(rng, 9000):,}",
        "small": str(2 + below(rng, 17)),
        "town": entities[pick(rng, towns)].name,
    }


def _shuffled(rng: random.Random, items: list[str]) -> list[str]:
    return [item for _, item in sorted((rng.random(), item) for item in items)]


def republish(text: str, rng: random.Random) -> str:
    """Return the text with one function word changed: a near duplicate. A text without such a word stays as it is."""
    words = text.split(" ")
    places = [at for at, word in enumerate(words) if word in SWAPS]
    if places:
        at = pick(rng, places)
        words[at] = SWAPS[words[at]]
    return " ".join(words)
