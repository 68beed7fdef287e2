"""Drafts of tasks: what sentences say, what can be quoted, and the questions that come of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from harness1.records import DocId
from harness1.retrieval.corpus import Document
from harness1.tasks import drafts as forms
from harness1.tasks.drafts import Draft
from harness1.tasks.graph import (
    GAP,
    CorpusGraph,
    figures,
    find_statements,
    join_lines,
    stands_alone,
    stands_once,
    subject_of,
)


def corpus(*documents: tuple[str, str]) -> CorpusGraph:
    """A graph of documents, given by title and text."""
    return CorpusGraph(Document(DocId(f"d{place}"), title, text) for place, (title, text) in enumerate(documents))


def draw(
    form: Callable[[CorpusGraph, random.Random], Iterator[Draft]], *documents: str | tuple[str, str]
) -> list[Draft]:
    """The drafts of twenty seeds over some texts."""
    graph = corpus(*(("", each) if isinstance(each, str) else each for each in documents))
    return [draft for seed in range(20) for draft in form(graph, random.Random(seed))]


FILMS = corpus(
    ("The Quiet Bay", "The Quiet Bay is a 1951 British drama film directed by Ada Fenwick."),
    ("Ada Fenwick", "Ada Fenwick (3 May 1902 – 9 June 1980) was an English director, born in Grimsby."),
    ("Harbour Lights", "Harbour Lights is a 1962 comedy film directed by Tom Arkwright and starring Ada Fenwick."),
    ("Tom Arkwright", "Tom Arkwright (born 7 August 1921) is a Scottish director. He was married to Ada Fenwick."),
)


@pytest.mark.parametrize(
    ("title", "subject"),
    [
        ("Ada Fenwick (director)", "Ada Fenwick"),
        ("Twitter - History | Creation", "Twitter"),
        ("json.dumps (function)", "json.dumps"),
        ("Can we apply the definition of the metabolic syndrome to Asians?", ""),
        ("", ""),
        ("No. 2 (film)", ""),
        ("Kicking &amp; Screaming (2005 film)", "Kicking & Screaming"),
    ],
)
def test_a_title_names_a_subject_unless_it_is_a_sentence(title: str, subject: str) -> None:
    assert subject_of(title) == subject


@pytest.mark.parametrize(
    ("title", "text", "said"),
    [
        ("Ann Lee", "Ann Lee (born 2 May 1950) is a singer.", {("birth", "1950")}),
        ("Ann Lee", "Ann Lee (12 May 1850 – 3 June 1911) was a singer.", {("birth", "1850")}),
        ("Ann Lee", "Ann Lee (died 1911) was a singer.", set()),
        ("Rain", "Rain. It was directed by Ann Li, written by Bo.", {("director", "Ann Li"), ("writer", "Bo")}),
        ("Hot Rain", "Hot Rain is a film co-directed by Ann Lee.", set()),
        ("Hot Rain", "Hot Rain is a film directed by Scottish painter Ann Lee.", set()),
        ("Hot Rain", "Hot Rain follows a man who was named after Ann Lee.", set()),
        ("Bo Inc", "Bo Inc is a label based in Oslo, founded in 1990.", {("seat", "Oslo"), ("founding", "1990")}),
        ("Bo", "Another film was directed by Ann Lee.", set()),
        ("Hot Rain", "Hot Rain was directed by Ann Lee. It was directed by Bo Ek.", set()),
    ],
)  # fmt: skip
def test_a_sentence_says_what_its_pattern_finds(title: str, text: str, said: set[tuple[str, str]]) -> None:
    assert {*find_statements(corpus((title, text)).passages[0]).items()} == said


def test_a_chain_asks_for_the_end_by_what_the_others_say() -> None:
    drafts = [draft for seed in range(20) for draft in forms.chain_drafts(FILMS, random.Random(seed))]
    answers = {draft.question: draft.answer for draft in drafts}
    assert answers["In which year was the director of The Quiet Bay born?"] == "1902"
    assert answers["Where was the director of The Quiet Bay born?"] == "Grimsby"
    assert {tuple(FILMS.passages[need.passage].subject for need in draft.needs) for draft in drafts} == {
        ("The Quiet Bay", "Ada Fenwick"),
        ("Harbour Lights", "Ada Fenwick"),
        ("Harbour Lights", "Tom Arkwright"),
        ("Tom Arkwright", "Ada Fenwick"),
        ("Harbour Lights", "Tom Arkwright", "Ada Fenwick"),
    }
    assert all(draft.links[-1] not in draft.question for draft in drafts)
    tune = ("Low Tide", "Low Tide is a song by Marble."), ("Marble", "Marble is a 1999 album.")
    assert draw(forms.chain_drafts, *tune) == []  # a person is not asked what only works have


def test_a_comparison_is_answered_by_the_smaller_year() -> None:
    [draft] = [draft for draft in forms.comparison_drafts(FILMS, random.Random(0)) if draft.form == "birth"]
    assert {*draft.question.removeprefix("Who was born first, ").rstrip("?").split(" or ")} == {
        "Ada Fenwick",
        "Tom Arkwright",
    }
    assert draft.answer == "Ada Fenwick"


def test_a_refuted_answer_differs_from_what_the_document_says() -> None:
    drafts = [draft for seed in range(8) for draft in forms.claim_drafts(FILMS, random.Random(seed))]
    assert {draft.answer for draft in drafts} == {"supported", "refuted"}
    for draft in drafts:
        told = draft.question.rpartition("Check this answer: ")[2].rstrip(".")
        assert (told == draft.needs[0].names[1]) == (draft.answer == "supported")
    places = ("Ann Lee", "Ann Lee is a singer, born in Oslo."), ("Bo Ek", "Bo Ek is a painter, born in Norway.")
    assert {draft.answer for draft in draw(forms.claim_drafts, *places)} == {"supported"}  # one may lie in the other


@pytest.mark.parametrize(
    ("sentence", "fit"),
    [
        ("Ada Fenwick directed eleven films between the two wars.", True),
        ("She directed eleven films between the two wars of Europe.", False),
        ("Ada Fenwick directed the films that we list in this chapter.", False),
        ("Ada Fenwick directed films", False),
        ("Hence the films of Ada Fenwick were shown in Grimsby again.", False),
        ("In 1951 he moved to the harbour town that is called Grimsby.", False),
        ("The film was shown to many people in Grimsby in the summer.", False),
        ("Ada Fenwick said that the company was sold to Tom Arkwright.", False),
        ("Ada Fenwick said that the company of Grimsby was sold again.", True),
        ("RESULTS Ada Fenwick was shown to have directed eleven films.", False),
        ("Ada Fenwick was glad (it is said to have directed the films.", False),
        ("Home News Films About Ada Fenwick Contact Us is shown in it.", False),
        ("# History Ada Fenwick directed eleven films in the summers.", False),
        ("| 12 | 44 | 19 | 88 | 12 | 33 | 97 | 61 | 5 | 20 | 11 | 3.", False),
    ],
)
def test_only_a_sentence_that_stands_alone_is_quoted(sentence: str, fit: bool) -> None:
    assert stands_alone(sentence) == fit


@pytest.mark.parametrize(
    ("sentence", "part", "fit"),
    [
        ("A film with Ada Fenwick in it.", "Ada Fenwick", True),
        ("A film with Lady Ada Fenwick in it.", "Ada Fenwick", False),
        ("A film with Ada Fenwick Jones in it.", "Ada Fenwick", False),
        ("A film (with Ada Fenwick) from 1951.", "Ada Fenwick", False),
        ("A film of the 75th Ada Fenwick group.", "Ada Fenwick", False),
        ("A film on Ada Fenwick's life.", "Ada Fenwick", False),
        ("Undiscounted flows are estimated.", "Undiscounted", False),
        ("Ada Fenwick met Ada Fenwick.", "Ada Fenwick", False),
    ],
)
def test_a_gap_never_cuts_a_longer_name(sentence: str, part: str, fit: bool) -> None:
    assert stands_once(sentence, part) == fit


def test_lines_of_a_paragraph_are_joined_and_those_of_lists_and_tables_are_not() -> None:
    text = """Name
The harbour of Grimsby was closed for all the larger ships,
so that Ada Fenwick had to come by the train that ran at
Night. The next day she left.
- one
- two
Year | Ships
1951 | 12
"""
    paragraph, *_ = (each for each in join_lines(text).splitlines() if each.startswith("The"))
    assert "larger ships, so that Ada" in paragraph
    assert "that ran at Night. The next" in paragraph
    rest = [each for each in join_lines(text).splitlines() if each != paragraph]
    assert rest == ["Name", "- one", "- two", "Year | Ships", "1951 | 12"]


def test_references_are_left_out_of_a_quotation() -> None:
    said = "Ada Fenwick was born in the old harbour [3, 5] of Grimsby (Arkwright et al, 1951)."
    more = " Ada Fenwick was told of 28 tides of the northern coast 31, 32 ."
    assert [each for _, each in corpus(("", said + more)).quotable[0]] == [
        "Ada Fenwick was born in the old harbour of Grimsby.",
        "Ada Fenwick was told of 28 tides of the northern coast.",
    ]


def test_a_name_is_changed_only_into_one_of_its_sort_that_stood_behind_the_same_word() -> None:
    claims = draw(
        forms.change_drafts,
        "The oldest lighthouse near Grimsby was built by Ada Fenwick in stone.",
        "The broken lighthouse near Port Ellen was built by Tom Arkwright in wood.",
        "Some of what Dan Marsh knew was told to Bea Carver of the harbour by the sailors.",
    )
    told = {each.question for each in claims if "stone" in each.question}
    assert "Is this true? The oldest lighthouse near Grimsby was built by Tom Arkwright in stone." in told
    assert not any("Carver" in each for each in told)
    claims = draw(
        forms.change_drafts,
        "Tom Marsh of Grimsby played the viola with the Carver Orchestra in Leith in the war.",
        "Ada Fenwick of Hull played the viola with the Arkwright Institute in Leith in the war.",
        "The orchestra of the palace and the institute of the harbour are told of here.",
    )
    assert claims
    for name, other in (("Ada", "Orchestra"), ("Tom", "Institute")):
        assert not any(name in each.question and other in each.question for each in claims)


def test_a_name_of_common_words_is_no_name() -> None:
    text = "The {} hall near the National Gallery was seen by Ada Fenwick and all the people of the town."
    halls = [text.format(each) for each in ("old", "small", "white")]
    drafts = draw(forms.aspect_drafts, "He saw a national gallery by the sea with all its harbour paintings.", *halls)
    assert {draft.answer for draft in drafts} == {"Ada Fenwick"}


def test_labels_days_and_single_digits_are_no_figures() -> None:
    said = "On March 14, 1951, in Note 12 and [33], 7 of 45 firms paid $1,200 or 3.5%."
    assert figures(said) == ["45", "$1,200", "3.5%"]
    assert figures("It was lit in 1951 and 1953, and was closed in 1952 and 1969.") == ["1969"]


def test_a_figure_is_changed_into_another_of_the_same_look() -> None:
    said = "Is this true? The harbour of Grimsby was closed in 195{} for all the larger ships."
    told = {draft.question for draft in draw(forms.change_drafts, said.removeprefix("Is this true? ").format(1))}
    assert told <= {said.format(digit) for digit in range(10)}
    assert len(told) > 2
    assert said.format(1) in told


def test_a_lead_hides_a_rare_name_and_needs_every_document_that_holds_it() -> None:
    drafts = draw(
        forms.lead_drafts,
        "The oldest lighthouse of the coast of Grimsby was built by Ada Fenwick in stone.",
        "The medal of the society was given to Ada Fenwick in 1951 for her late work on tides.",
        "Nobody else is told of in the books of the harbour of the town.",
    )
    assert {draft.answer for draft in drafts} == {"Ada Fenwick"}
    for draft in drafts:
        assert GAP in draft.question
        assert "Ada Fenwick" not in draft.question
        assert {need.passage for need in draft.needs} == {0, 1}


def test_a_short_sentence_with_a_gap_needs_another_name_or_a_figure() -> None:
    told = "The medal of the society was given to Ada Fenwick for her late work."
    drafts = draw(forms.lead_drafts, told, "The oldest lighthouse near Grimsby was built by Ada Fenwick in stone.")
    assert {draft.needs[0].passage for draft in drafts} == {1}


def test_headings_are_not_told_of() -> None:
    menu = "Permissions Site Map. The rest of this page tells of harbours and of their ships."
    assert draw(forms.aspect_drafts, *(f"{menu} Part {number}." for number in range(3))) == []


def test_a_description_gives_no_word_of_the_name_away_and_does_not_point_out_of_itself() -> None:
    drafts = draw(
        forms.description_drafts,
        ("os.path.join (function)", "os.path.join(a, *p)\nPut two or more pathnames together with separators."),
        ("shutil.rmtree (function)", "shutil.rmtree(path)\nAs rmtree does, delete a directory with all in it."),
        ("Harbour Review", "The journal publishes today an article of great interest about the northern tides."),
        ("Harbour Notes", "The weekly publishes articles of great interest about the tides of the north."),
    )
    assert {(draft.question, draft.answer) for draft in drafts} == {
        ("What is described like this? “Put two or more pathnames together with separators.”", "os.path.join"),
        (
            "What is described like this? “The weekly publishes articles of great interest about the tides of the"
            " north.”",
            "Harbour Notes",
        ),
    }


RUN_ON = (
    "the three founders made their pitch to the investors of Peter Marlow and soon his firm agreed to put four million"
    " into the startup of Demi Hassan the company was named after the computer of a novel and was sold nine years later"
)


def test_text_without_full_stops_gives_excerpts_with_a_name_left_out() -> None:
    for draft in (drafts := draw(forms.excerpt_drafts, RUN_ON)):
        told = draft.question.removeprefix("Which name fits in this excerpt? “… ").removesuffix(" …”")
        assert told.replace(GAP, draft.answer) in RUN_ON
        for name in ("Demi Hassan", "Peter Marlow"):
            assert (draft.answer == name) != (name in told)
    assert len(drafts) == 20


@pytest.mark.parametrize(
    "text",
    [
        RUN_ON.replace("Peter Marlow", "others"),
        RUN_ON.replace("Demi Hassan the", "Demi Hassan The").replace("Peter Marlow", "Peter Marlow And"),
        RUN_ON.replace(" soon ", " | "),
        "-2400 Ellis Zorro +1150 Cruiserweight Arslan Makhmud -1000 Agit Kabayel +650 Heavyweight Frank Sanchez",
    ],
)
def test_an_excerpt_needs_prose_and_a_second_name(text: str) -> None:
    assert draw(forms.excerpt_drafts, text) == []


def test_words_of_two_sentences_are_no_name_in_an_excerpt() -> None:
    small, ran_on = "Every company of the town is listed here by name.", "Demi Hassan the company"
    texts = [RUN_ON.replace(ran_on, "Hassan Company the firm"), small]
    assert "Hassan Company" not in {draft.answer for draft in draw(forms.excerpt_drafts, *texts)}
    texts.append(RUN_ON.replace(ran_on, "Hassan Company whose name"))
    assert "Hassan Company" in {draft.answer for draft in draw(forms.excerpt_drafts, *texts)}


LINES = "counted 44 lines of the tide table for whoever asked for them."


@pytest.mark.parametrize(
    ("title", "claim", "fit"),
    [
        ("", "Summary incidence rates and 95% confidence intervals were calculated using these models.", False),
        ("", "Summary rates of the Fenwick study and 95% confidence intervals were calculated with models.", True),
        ("", "Plans with a status of less than 80% of the liability are defined as being at risk.", False),
        ("", "Plans of Fenwick Mutual of less than 80% of the liability are defined as being at risk.", True),
        ("", "Minna Waldeck of Grimsby died on 12 September 1831 at home.", False),
        ("", "The bookmaker at Grimsby sets the total at 215 5 points for the combined score.", False),
        ("tides.lines", f"Harbour Review of Grimsby {LINES}", False),  # what code does is no claim
        ("Harbour Review", f"Harbour Review of Grimsby {LINES}", True),
        ("", f"In Grimsby with Ada Fenwick of Hull he and Marsh {LINES}", False),  # nor is what somebody did
        ("", f"In Grimsby with Ada Fenwick of Hull her friend Marsh {LINES}", False),
        ("", f"In Grimsby with Ada Fenwick of Hull Tom Marsh {LINES}", True),
    ],
)
def test_a_claim_says_what_it_is_about_and_changes_no_piece_of_a_figure(title: str, claim: str, fit: bool) -> None:
    assert any(draft.form == "figure" for draft in draw(forms.change_drafts, (title, claim))) is fit


def test_a_word_that_only_opens_a_sentence_is_no_part_of_a_name() -> None:
    drafts = draw(
        forms.gap_drafts,
        "Loss of Fenwickin was followed by repairs of the northern harbour wall by Tom Arkwright and Bo Ekman.",
        "A loss was large, and the wall of Grimsby has been built anew by Ada Fenwick and Mia Holt since then.",
    )
    assert "Tom Arkwright" in {draft.answer for draft in drafts}
    assert not any("Loss" in draft.answer for draft in drafts)


@pytest.mark.parametrize("name", ["Cdk1-activating", "Grimsby-based", "DICER-dependent"])
def test_what_a_hyphen_makes_an_adjective_is_no_name(name: str) -> None:
    text = f"Proteins of Grimsby have declined in response to {name} repairs by Tom Arkwright."
    answers = {draft.answer for draft in draw(forms.gap_drafts, text)}
    assert "Tom Arkwright" in answers
    assert name not in answers


def test_names_of_a_corpus_are_in_the_order_of_its_text_in_every_process() -> None:
    assert [*FILMS.holders][:5] == ["quiet bay", "british", "ada fenwick", "english", "grimsby"]
