"""Extracts names, years and dates, which link one document to another."""

from __future__ import annotations

import re
from functools import lru_cache

from harness1.memory.sentences import UPPER, vocabulary

FUNCTION_WORDS = vocabulary(
    """a an the this that these those it its it's he she his her hers him they them their theirs we us our ours you your
    yours i me my mine who whom whose which what when where why how whether there here one ones
    and or but nor so yet if then than as because since although though while whereas unless until once despite
    in on at for by with without to from of off into onto over under above below between among amongst across through
    throughout during before after within against toward towards upon about around along beyond behind beside besides
    near like unlike per via regarding concerning according due
    is are was were be been being am has have had having do does did doing done can could will would shall should might
    must not no never neither none nothing
    however moreover therefore furthermore additionally meanwhile instead otherwise thus hence also still even indeed
    nevertheless nonetheless consequently subsequently accordingly afterwards afterward later earlier eventually finally
    initially originally previously recently currently today yesterday tomorrow now soon often usually sometimes
    generally typically especially particularly specifically similarly likewise conversely alternatively overall
    perhaps maybe only just both either each every all any some many most much more less few fewer several such other
    another others same too very rather quite again always already almost yes please together
    first second third fourth last next two three four five six seven eight nine ten
    page pages section sections chapter figure figures fig table tables document documents appendix item part note notes
    mr mr. mrs mrs. ms ms. dr dr. prof prof. sir"""
)
"""Words that are not names by themselves, and with which no name starts."""

_COMMON = vocabulary(
    """abstract access action actions activities activity add addition adults age ages aim aims analyses
    analysis animals answer anyone anything approximately area areas army article articles attempts author
    authors available background bands based beginning benefits best better books born boys brother brothers
    building buildings built business called calls careful cases cash cause causes cells census century certain
    change changes characters check child children cities city clearly click clinical club clubs coach combined
    coming companies company compared comparison conclusion conclusions conditions consider considering
    construction contact contents continue contrary control copy cost costs countries country couple court
    create created credit critics current daily data date daughter day days death deaths decades define defines
    description design details development different difficult directed director directors disease doctors dogs
    economic education effects efforts employees ending episode episodes events everyone everything evidence
    example examples except existing experts families family fans father features female film films financial
    find findings following food formed former found founded free friends full fully further future game games
    general get girls given giving global go going good government governments great greater group groups growth
    half health help high higher historically history home hospital hours human humans important income
    increased increases increasing individual individuals industry information inside interest interestingly
    international introduction investigators investors issues job keep key kids kill knowing known lack land
    large larger lawyers leaders learn leaving led left let letters level levels life light limited list little
    live lives living local located long look looking lost love low lower made main major make making male
    management manager market markets materials means measures media medical members men method methods military
    million millions minutes model models modern money months morning mostly mother movie murder music musicians
    names native natural nearly net new news night nobody north numerous objective objectives observers office
    officers officials old older operations opponents opposite option options order out outcomes outside owned
    owners paper parents participants parties past patients pay people performance period persons phase
    physicians place plans play played players plot plus police political population possible power present
    president previous price prices prior problem problems produced product production products profits program
    proof protein proteins provided public published purpose put question questions raise raises read readers
    reading real reason reasons received recent records related released remaining report reported reporters
    reports request required research researchers residents response rest result results return returns revenue
    revenues review reviews right risk role round rules sales samples scenes school schools science scientists
    scores season seasons see seen select selected self senior services set setting share shares shortly show
    showing shows side significant simple single sister site situated sixty small social society soldiers
    someone something son songs source sources south special staff standing star starring stars start started
    starting state statements states stock stop stories story strong structure student students studies study
    style subject success summary support supporters survey system systems take taken taking tax taxes teachers
    team teams television tell temperature term terms test tests text thanks theme things think thirty thousands
    time times title topics total traditional training treatment trials try trying twenty type types typical
    unable understanding unfortunately use used users uses using value values various version video view views
    village visitors voters votes want war warning water way ways week weeks welcome well white wife wild
    winning witnesses women words work workers working works world write writer writers writing written year
    years young younger"""
)
"""Words that begin sentences without being names; they count as names only where the text has them inside a
sentence."""

_CALENDAR = vocabulary(
    """january february march april may june july august september october november december
    monday tuesday wednesday thursday friday saturday sunday
    jan feb mar apr jun jul aug sep sept oct nov dec mon tue wed thu fri sat sun spring summer autumn fall winter
    bc ad bce ce am pm"""
)
_OPENINGS = FUNCTION_WORDS | _CALENDAR
_ACRONYMS = frozenset(("US", "WHO"))
_CONTRACTIONS = frozenset(("t", "s", "m", "d", "ll", "re", "ve"))
_LONGEST = 100
_SENTENCE_BREAKS = ".!?:;\n\r\t•*|-–—"

_U = f"[A-Z{UPPER}]"
_TITLE = r"(?:Mr|Mrs|Ms|Dr|Prof|St|Mt|Ft|Gen|Sen|Gov|Lt|Col|Capt|Sgt)\.(?= )"
_REST = r"\w*+(?:&\w++)*+(?:['’](?!s\b)\w++|-\w++)*+"
_WORD = rf"(?:{_TITLE}|{_U}\.(?:{_U}\.)*+|{_U}{_REST})"
_PARTICLE = r"(?:of|the|van|von|der|den|de|del|della|di|da|dos|du|la|le|el|al|bin|ibn|&) "
_JOIN = rf" (?:{_PARTICLE}){{0,2}}(?:(?:al|el)-|[dl]['’])?"
_NAME = rf"{_WORD}(?:{_JOIN}{_WORD}){{0,5}}(?: [0-9]{{1,3}}(?![\w%]|[.,:/-][0-9]))?"
_DATE = r"(?<![0-9][.,])(?:[0-9]{4}s?|[0-9]{1,2}/[0-9]{1,2}/[0-9]{2,4})(?![\w/]|[.,][0-9])"
_ENTITY = re.compile(
    # The lookahead lets the search skip what can begin no entity; the group is the tail of iPhone, eBay, mRNA.
    rf"(?=[A-Z0-9{UPPER}])(?:(?<!\w)(?:{_DATE}|[0-9]{{0,2}}{_NAME})|(?:(?<=\b[a-z])|(?<=\b[a-z][a-z]))({_U}\w+))"
)

_YEAR = re.compile(_DATE)


@lru_cache(maxsize=2048)
def extract(text: str, limit_characters: int) -> tuple[str, ...]:
    """Return the distinct entities of the first `limit_characters` of a text, in order of first appearance.

    They are names (runs of up to six capitalised words, with particles, initials and a trailing number), acronyms,
    mixed-case words, four-digit years and decades, and numeric dates. Leading function words and honorifics, and
    possessive endings, are taken off. A single common word at the start of a sentence counts only where the text has it
    capitalised inside a sentence as well.
    """
    text = text[:limit_characters]
    found: dict[str, bool] = {}
    for match in _ENTITY.finditer(text):
        raw = match.group()
        if match.lastindex:
            found[_head(text, match.start()) + raw] = True
            continue
        for part in _parts(raw) if ". " in raw else (raw,):
            name, common = _name(part)
            if not common or part != raw or not _starts_sentence(text, match.start()):
                found[name] = True
            else:
                found.setdefault(name, False)
    return tuple([name for name, certain in found.items() if certain and name])


def _head(text: str, start: int) -> str:
    """Return the one or two lower-case letters before the capital of a mixed-case word."""
    return text[start - 2 : start].lstrip() if start > 1 and text[start - 2].isalpha() else text[start - 1]


def _parts(raw: str) -> list[str]:
    """Cut a match where an abbreviation turns out to have ended a sentence, because a function word follows."""
    parts: list[list[str]] = [[]]
    for word in raw.split(" "):
        if parts[-1] and parts[-1][-1].endswith(".") and word[0].isupper() and word.lower() in FUNCTION_WORDS:
            parts.append([])
        parts[-1].append(word)
    return [" ".join(part) for part in parts]


def _name(raw: str) -> tuple[str, bool]:
    """Return the name in a match, without leading function words, and whether it is a common word. A bare month,
    numeral, initial or letter gives an empty name."""
    head = raw.partition(" ")[0]
    lowered = head.lower()
    if head.isalpha() and len(head) > 1 and lowered not in _OPENINGS and head.strip("IVX") and raw[-1] != ".":
        # Most matches are whole names as they stand.
        return (raw, len(head) == len(raw) and lowered in _COMMON) if len(raw) <= _LONGEST else ("", False)
    if raw[0].isdigit() and _YEAR.fullmatch(raw):
        return raw, False
    words = raw.split(" ")
    first = 0
    while first < len(words) and _leads(words[first]):
        first += 1
    words = words[first:]
    if not words or len(raw) > _LONGEST or _names_nothing(words):
        return "", False
    if _is_initial(words[-1]):
        words[-1] = words[-1][:-1]
    return " ".join(words), first == 0 and words[0].lower() in _COMMON and len(words) == 1


def _names_nothing(words: list[str]) -> bool:
    if len(words) == 1 and (len(words[0]) < 2 or _is_initial(words[0])):
        return True
    numbered = words[0].lower().rstrip(".") in _CALENDAR
    rest = "".join(words[numbered:])
    return not rest or rest.isdigit()


def _leads(word: str) -> bool:
    """Return whether a word cannot start a name: a function word, a contraction, or the Roman numeral of a part or
    list."""
    lowered = word.lower()
    if lowered in FUNCTION_WORDS:
        return word not in _ACRONYMS
    if "'" in word or "’" in word:
        stem, _, ending = lowered.replace("’", "'").partition("'")
        return ending in _CONTRACTIONS and (ending == "t" or stem in FUNCTION_WORDS)
    return 1 < len(word) < 6 and not word.strip("IVX")


def _is_initial(word: str) -> bool:
    return len(word) == 2 and word[1] == "."


def _starts_sentence(text: str, start: int) -> bool:
    before = text[max(0, start - 4) : start].rstrip(" \"'“‘([")
    return not before or before[-1] in _SENTENCE_BREAKS
