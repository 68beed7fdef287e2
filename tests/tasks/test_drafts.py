"""Drafts of tasks: what sentences say, what can be quoted, and the questions that come of it."""

from __future__ import annotations

import random

import pytest

from harness1.records import DocId
from harness1.retrieval.corpus import Document
from harness1.tasks import drafts as forms
from harness1.tasks.graph import (
    GAP,
    CorpusGraph,
    drop_citations,
    facts_of,
    figures,
    graph_of,
    join_lines,
    stands_alone,
    stands_once,
    statements,
    subject_of,
)


def corpus(*documents: tuple[str, str]) -> CorpusGraph:
    """A graph of documents, given by title and text."""
    return graph_of(Document(DocId(f"d{place}"), title, text) for place, (title, text) in enumerate(documents))


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
    ],
)  # fmt: skip
def test_a_sentence_says_what_its_pattern_finds_of_its_subject(
    title: str, text: str, said: set[tuple[str, str]]
) -> None:
    assert {(each.relation, each.answer) for each in statements(corpus((title, text)).passages[0])} == said


def test_what_is_said_in_two_ways_is_not_said() -> None:
    text = "Hot Rain was directed by Ann Lee. It was directed by Bo Ek."
    assert list(statements(corpus(("Hot Rain", text)).passages[0])) == []


def test_a_chain_asks_for_the_end_by_what_the_others_say() -> None:
    drafts = list(forms.chain_drafts(facts_of(FILMS), random.Random(1)))
    found = {draft.question: draft for draft in drafts}
    asked = found.get("In which year was the director of The Quiet Bay born?") or found.get(
        "Where was the director of The Quiet Bay born?"
    )
    chained = {tuple(FILMS.passages[need.passage].subject for need in draft.needs) for draft in drafts}
    assert chained <= {
        ("The Quiet Bay", "Ada Fenwick"),
        ("Harbour Lights", "Ada Fenwick"),
        ("Harbour Lights", "Tom Arkwright"),
        ("Tom Arkwright", "Ada Fenwick"),
        ("Harbour Lights", "Tom Arkwright", "Ada Fenwick"),
    }
    assert drafts
    assert all(draft.links[-1] not in draft.question for draft in drafts)
    if asked is not None:
        assert asked.answer in ("1902", "Grimsby")


def test_a_chain_never_asks_of_a_person_what_only_works_have() -> None:
    graph = corpus(("Low Tide", "Low Tide is a song by Marble."), ("Marble", "Marble is a 1999 album."))
    assert list(forms.chain_drafts(facts_of(graph), random.Random(0))) == []


def test_a_comparison_is_answered_by_the_smaller_year() -> None:
    [draft] = [draft for draft in forms.comparison_drafts(facts_of(FILMS), random.Random(0)) if draft.form == "birth"]
    assert draft.question in (
        "Who was born first, Ada Fenwick or Tom Arkwright?",
        "Who was born first, Tom Arkwright or Ada Fenwick?",
    )
    assert draft.answer == "Ada Fenwick"


def test_a_refuted_answer_differs_from_what_the_document_says() -> None:
    drafts = [draft for seed in range(8) for draft in forms.claim_drafts(facts_of(FILMS), random.Random(seed))]
    assert {draft.answer for draft in drafts} == {"supported", "refuted"}
    for draft in drafts:
        told = draft.question.rpartition("Check this answer: ")[2].rstrip(".")
        assert (told == draft.needs[0].names[1]) == (draft.answer == "supported")


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
    assert [each for each in join_lines(text).splitlines() if each != paragraph] == [
        "Name",
        "- one",
        "- two",
        "Year | Ships",
        "1951 | 12",
    ]


def test_references_are_left_out_of_a_quotation() -> None:
    assert drop_citations("Ada Fenwick was born here [3, 5] (Arkwright et al. 1951).") == "Ada Fenwick was born here."
    assert drop_citations("She told of 28 tides 31, 32 .") == "She told of 28 tides."


def test_a_name_is_changed_only_into_one_that_stood_behind_the_same_word() -> None:
    graph = corpus(
        ("", "The oldest lighthouse near Grimsby was built by Ada Fenwick in stone."),
        ("", "The broken lighthouse near Port Ellen was built by Tom Arkwright in wood."),
        ("", "Some of what Dan Marsh knew was told to Bea Carver of the harbour by the sailors."),
    )
    claims = {draft.question for seed in range(20) for draft in forms.change_drafts(graph, random.Random(seed))}
    told = {each for each in claims if "stone" in each}
    assert "Is this true? The oldest lighthouse near Grimsby was built by Tom Arkwright in stone." in told
    assert not any("Carver" in each for each in told)


def test_a_place_is_never_refuted_by_another_that_may_lie_in_it() -> None:
    graph = corpus(("Ann Lee", "Ann Lee is a singer, born in Oslo."), ("Bo Ek", "Bo Ek is a painter, born in Norway."))
    drafts = [draft for seed in range(8) for draft in forms.claim_drafts(facts_of(graph), random.Random(seed))]
    assert {draft.answer for draft in drafts} == {"supported"}


def test_a_name_of_common_words_is_no_name() -> None:
    text = "The {} was seen by Ada Fenwick and all the people of the town."
    graph = corpus(
        ("", "He saw a national gallery by the sea with all its harbour paintings."),
        *[("", text.format(f"{each} hall near the National Gallery")) for each in ("old", "small", "white")],
    )
    drafts = list(forms.aspect_drafts(graph, random.Random(0)))
    assert {draft.answer for draft in drafts} == {"Ada Fenwick"}


def test_labels_days_and_single_digits_are_no_figures() -> None:
    assert figures("On March 14, 1951, in Note 12 and [33], 7 of 45 firms paid $1,200 or 3.5%.") == [
        "45",
        "$1,200",
        "3.5%",
    ]
    assert figures("It was lit in 1951 and 1953, and was closed in 1952 and 1969.") == ["1969"]


def test_a_figure_is_changed_into_another_of_the_same_look() -> None:
    graph = corpus(("", "The harbour of Grimsby was closed in 1951 for all the larger ships."))
    told = {draft.question for seed in range(30) for draft in forms.change_drafts(graph, random.Random(seed))}
    assert "Is this true? The harbour of Grimsby was closed in 1951 for all the larger ships." in told
    assert {each[: -len("1 for all the larger ships.")] for each in told} == {
        "Is this true? The harbour of Grimsby was closed in 195"
    }


def test_a_lead_hides_a_rare_name_and_needs_every_document_that_holds_it() -> None:
    graph = corpus(
        ("", "The oldest lighthouse of the coast of Grimsby was built by Ada Fenwick in stone."),
        ("", "The medal of the society was given to Ada Fenwick in 1951 for her late work on tides."),
        ("", "Nobody else is told of in the books of the harbour of the town."),
    )
    drafts = list(forms.lead_drafts(graph, random.Random(0)))
    assert {draft.answer for draft in drafts} == {"Ada Fenwick"}
    for draft in drafts:
        assert "Ada Fenwick" not in draft.question
        assert GAP in draft.question
        assert {need.passage for need in draft.needs} == {0, 1}


def test_headings_are_not_told_of() -> None:
    menu = "Permissions Site Map. The rest of this page tells of harbours and of their ships."
    graph = corpus(*[("", f"{menu} Part {number}.") for number in range(3)])
    assert list(forms.aspect_drafts(graph, random.Random(0))) == []


def test_a_description_gives_no_word_of_the_name_away() -> None:
    graph = corpus(
        ("os.path.join (function)", "os.path.join(a, *p)\nPut two or more pathnames together with separators."),
        ("shutil.rmtree (function)", "shutil.rmtree(path)\nAs rmtree does, delete a directory with all in it."),
    )
    [draft] = forms.description_drafts(graph, random.Random(0))
    assert (draft.question, draft.answer) == (
        "What is described like this? “Put two or more pathnames together with separators.”",
        "os.path.join",
    )


RUN_ON = (
    "the three founders made their pitch to the investors of Peter Marlow and soon his firm agreed to put four million"
    " into the startup of Demi Hassan the company was named after the computer of a novel and was sold nine years later"
)


def excerpts(*texts: str) -> list[tuple[str, str]]:
    drafts = forms.excerpt_drafts(corpus(*(("", text) for text in texts)), random.Random(2))
    return [(draft.question, draft.answer) for draft in drafts]


def test_text_without_full_stops_gives_excerpts_with_a_name_left_out() -> None:
    ((question, answer),) = excerpts(RUN_ON)
    told = question.removeprefix("Which name fits in this excerpt? “… ").removesuffix(" …”")
    assert told.replace(GAP, answer) in RUN_ON
    assert (answer == "Demi Hassan") != ("Demi Hassan" in told)
    assert (answer == "Peter Marlow") != ("Peter Marlow" in told)


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
    assert excerpts(text) == []


def test_a_short_sentence_with_a_gap_needs_another_name_or_a_figure() -> None:
    told = "The medal of the society was given to Ada Fenwick for her late work."
    other = ("", "The oldest lighthouse near Grimsby was built by Ada Fenwick in stone.")
    leading = {draft.needs[0].passage for draft in forms.lead_drafts(corpus(("", told), other), random.Random(0))}
    assert leading == {1}


@pytest.mark.parametrize(
    ("claim", "fit"),
    [
        ("Summary incidence rates and 95% confidence intervals were calculated using these models.", False),
        ("Summary rates of the Fenwick study and 95% confidence intervals were calculated with models.", True),
        ("Plans with a status of less than 80% of the liability are defined as being at risk.", False),
        ("Plans of Fenwick Mutual of less than 80% of the liability are defined as being at risk.", True),
        ("Minna Waldeck of Grimsby died on 12 September 1831 at home.", False),
        ("The bookmaker at Grimsby sets the total at 215 5 points for the combined score.", False),
    ],
)
def test_a_claim_says_what_it_is_about_and_changes_no_piece_of_a_figure(claim: str, fit: bool) -> None:
    drafts = [draft for seed in range(9) for draft in forms.change_drafts(corpus(("", claim)), random.Random(seed))]
    assert any(draft.form == "figure" for draft in drafts) is fit


def test_a_description_does_not_point_out_of_itself() -> None:
    said = "publishes today a research article of great interest about the tides of the northern coast."
    for opening, fit in ((f"The journal {said}", False), (f"The journal {said.replace('today ', '')}", True)):
        drafts = forms.description_drafts(corpus(("Harbour Review", opening)), random.Random(0))
        assert any(True for _ in drafts) is fit


def test_a_name_is_changed_only_into_one_of_its_sort() -> None:
    graph = corpus(
        ("", "Tom Marsh of Grimsby played the viola with the Carver Orchestra in Leith in the war."),
        ("", "Ada Fenwick of Hull played the viola with the Arkwright Institute in Leith in the war."),
        ("", "The orchestra of the palace and the institute of the harbour are told of here."),
    )
    claims = {draft.question for seed in range(20) for draft in forms.change_drafts(graph, random.Random(seed))}
    assert not any("Ada" in each and "Orchestra" in each for each in claims)
    assert not any("Tom" in each and "Institute" in each for each in claims)


def test_what_code_does_is_no_claim() -> None:
    said = "Harbour Review of Grimsby gives back 44 lines of the tide table to whoever asks for them."
    for title, fit in (("tides.lines", False), ("Harbour Review", True)):
        drafts = [each for seed in range(9) for each in forms.change_drafts(corpus((title, said)), random.Random(seed))]
        assert bool(drafts) is fit


def test_a_word_that_only_opens_a_sentence_is_no_part_of_a_name() -> None:
    graph = corpus(
        ("", "Loss of Fenwickin was followed by repairs of the northern harbour wall by Tom Arkwright and Bo Ekman."),
        ("", "A loss was large, and the wall of Grimsby has been built anew by Ada Fenwick and Mia Holt since then."),
    )
    asked = {draft.answer for seed in range(20) for draft in forms.gap_drafts(graph, random.Random(seed))}
    assert "Tom Arkwright" in asked
    assert not any("Loss" in answer for answer in asked)


@pytest.mark.parametrize("name", ["Cdk1-activating", "Grimsby-based", "DICER-dependent"])
def test_what_a_hyphen_makes_an_adjective_is_no_name(name: str) -> None:
    graph = corpus(("", f"Proteins of Grimsby have declined in response to {name} repairs by Tom Arkwright."))
    asked = {draft.answer for seed in range(20) for draft in forms.gap_drafts(graph, random.Random(seed))}
    assert "Tom Arkwright" in asked
    assert name not in asked


@pytest.mark.parametrize(("pronoun", "fit"), [("he and", False), ("her friend", False), ("Tom", True)])
def test_what_somebody_did_is_no_claim(pronoun: str, fit: bool) -> None:
    claim = f"In Grimsby with Ada Fenwick of Hull {pronoun} Marsh counted 44 lines of the tide table for whoever asked."
    drafts = [each for seed in range(9) for each in forms.change_drafts(corpus(("", claim)), random.Random(seed))]
    assert bool(drafts) is fit


def test_words_of_two_sentences_are_no_name_in_an_excerpt() -> None:
    ran_on = RUN_ON.replace("Demi Hassan the company", "Hassan Company the firm")
    small = ("", "Every company of the town is listed here by name.")

    def answers(*texts: str) -> set[str]:
        graph = corpus(*(("", text) for text in texts), small)
        return {draft.answer for seed in range(8) for draft in forms.excerpt_drafts(graph, random.Random(seed))}

    assert "Hassan Company" not in answers(ran_on)
    assert "Hassan Company" in answers(ran_on, RUN_ON.replace("Demi Hassan the company", "Hassan Company whose name"))


def test_a_subject_is_written_as_its_title_is_shown() -> None:
    assert subject_of("Kicking &amp; Screaming (2005 film)") == "Kicking & Screaming"


def test_names_of_a_corpus_are_in_the_order_of_its_text_in_every_process() -> None:
    assert [*FILMS.holders][:5] == ["quiet bay", "british", "ada fenwick", "english", "grimsby"]
