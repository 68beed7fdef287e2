"""Indexes of all languages: each finds its words, as written and in parts, and refuses terms of earlier versions."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1 import config
from harness1.config import load_config
from harness1.errors import ConfigError
from harness1.records import ChunkId, DocId
from harness1.retrieval.build import add_documents, build_index, delete_documents
from harness1.retrieval.corpus import Document, GivenChunk, approximate_tokens, chunk
from harness1.retrieval.index import OutdatedIndex, open_index

TEXTS = st.text(alphabet=st.sampled_from(list("aB1.!? \n\tÄ中")), max_size=200)


def document(text: str, doc_id: str = "d") -> Document:
    return Document(doc_id=DocId(doc_id), title="Title", text=text)


def texts(text: str, max_tokens: int) -> list[str]:
    return [piece.text for piece in chunk(document(text), max_tokens)]


@given(TEXTS, st.integers(1, 60))
def test_chunks_fit_and_lose_only_white_space_between_them(text: str, max_tokens: int) -> None:
    pieces = texts(text, max_tokens)
    at = 0
    for piece in pieces:
        assert approximate_tokens(piece) <= max_tokens
        found = text.index(piece, at)
        assert not text[at:found].strip()
        at = found + len(piece)
    assert not text[at:].strip()
    if approximate_tokens(text) <= max_tokens:
        assert pieces == [text]
    else:
        assert all(piece and piece == piece.strip() for piece in pieces) or not text.strip()


def test_a_cut_lies_at_a_sentence_border_or_white_space_or_anywhere() -> None:
    assert texts("One two. Three four. Five six.", 6) == ["One two. Three four.", "Five six."]
    assert texts("Is it? 7 are. Yes it is!", 4) == ["Is it? 7 are.", "Yes it is!"]
    assert texts("one two\nthree four five", 4) == ["one two", "three four five"]
    assert texts("See e.g. this one. Next is here.", 5) == ["See e.g. this one.", "Next is here."]
    assert texts("It is e.g. this and that one", 4) == ["It is e.g. this", "and that one"]
    assert texts("alpha beta gamma delta", 3) == ["alpha beta", "gamma delta"]
    assert texts("ab cdefg hijk", 2) == ["ab cdefg", "hijk"]
    assert texts("x" * 10, 1) == ["xxxx", "xxxx", "xx"]
    assert texts(" " * 100, 2) == [""]
    assert texts(" " * 400_000 + "\n" * 400_000 + "end.", 2) == ["end."], "quickly"
    assert [approximate_tokens("x" * size) for size in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_the_only_chunk_has_the_id_of_its_document_and_others_are_numbered() -> None:
    assert [piece.chunk_id for piece in chunk(document("short", "X_10K#p1"), 5)] == ["X_10K#p1"]
    pieces = chunk(document("x" * 10, "X_10K#p1"), 1)
    assert [(piece.chunk_id, piece.index) for piece in pieces] == [(f"X_10K#p1#{at}", at) for at in range(3)]
    assert {(piece.doc_id, piece.title) for piece in pieces} == {("X_10K#p1", "Title")}
    given = Document(DocId("d"), "Title", "one two", (GivenChunk(ChunkId("c1"), 0, 3), GivenChunk(ChunkId("c2"), 4, 7)))
    assert [(piece.chunk_id, piece.text) for piece in chunk(given, 1)] == [("c1", "one"), ("c2", "two")]


JAPANESE = {
    "tower": "東京タワーは1958年に完成した。設計者は内藤多仲である。",
    "fuji": "富士山は日本で最も高い山である。",
    "cat": "吾輩は猫である。名前はまだ無い。ｶﾀｶﾅとＮＨＫ。",
}

OTHERS = {
    "zh": "北京是中华人民共和国的首都。长城很长。",
    "ko": "서울은 대한민국의 수도이다. 한강이 흐른다.",
    "th": "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย",
    "ru": "Толстой написал много книг о войне.",
    "ar": "القاهرة عاصمة جمهورية مصر العربية و المكتبات كثيرة",
    "el": "Η Αθήνα είναι η πρωτεύουσα της Ελλάδας.",
    "my": "ရန်ကုန်မြို့သည် မြန်မာနိုင်ငံ၏ မြို့တော်",
    "km": "ភ្នំពេញជារាជធានីនៃប្រទេសកម្ពុជា",
    "lo": "ວຽງຈັນເປັນນະຄອນຫຼວງຂອງລາວ",
    "en": "Paris is the capital of France; books were written there.",
}


def documents(texts: dict[str, str]) -> list[Document]:
    return [Document(DocId(name), "", text) for name, text in texts.items()]


def build(path: Path, texts: dict[str, str], **settings: str):
    return build_index(documents(texts), path, config.Index(**settings))


def ranked(path: Path, query: str) -> list[tuple[str, float]]:
    index = open_index(path)
    return [(index.chunk(at).chunk_id, score) for at, score in index.bm25.search(query, 20)]


def found(path: Path, query: str) -> list[str]:
    return [name for name, _ in ranked(path, query)[:3]]


def test_a_question_finds_the_document_in_its_language(tmp_path) -> None:
    build(tmp_path, OTHERS)
    queries = "zh=中国的首都 zh=長城_长城 ko=대한민국_수도 ko=한강은 th=เมืองหลวง ru=книгами ar=مكتبة el=Αθήνας"
    for asked in f"{queries} my=မြန်မာ km=កម្ពុជា lo=ນະຄອນຫຼວງ en=written_books".split():
        name, _, query = asked.partition("=")
        assert found(tmp_path, query.replace("_", " "))[0] == name, query


def test_japanese_is_found_inside_sentences_and_in_either_width(tmp_path) -> None:
    assert build(tmp_path, JAPANESE).language == "auto"
    assert found(tmp_path, "東京タワーの設計者は誰")[0] == "tower"
    assert found(tmp_path, "日本の山")[0] == "fuji"
    assert found(tmp_path, "カタカナ") == found(tmp_path, "ｶﾀｶﾅ") == found(tmp_path, "nhk") == ["cat"]
    assert found(tmp_path, "猫") == ["cat"], "a word of one character"


ODD = {
    "床前明月光\n疑是地上霜": "床前 明月 月光 霜 疑是 光",
    "ペンギンは空を飛ばない。": "ペンギン 空 飛ばない",
    "고양이가 물을 마신다": "고양이 물 마신다",
    "The oﬃce of the ﬁshery staﬀ": "office fishery staff oﬃce",
    "De\u0301ja\u0300 a\u0300 Bru\u0308gge": "déjà à brügge",
    "infor\u00admation on micro\u00ad\nfossils, zero\u200bwidth": "information microfossils zerowidth",
    "Ｆｕｌｌ １２３４ ｷﾞﾀｰ": "full 1234 ギター",
    "photo-\nsynthesis and crystal-\r\n  lography": "photosynthesis photo-synthesis crystallography",
    "на\u0301сыпь и ёлка": "насыпь ёлка и",
}
"""Texts as files hold them, with queries as people type them."""
PLAIN = {f"en{at}": f"River {at} runs past castle {at // 7} in winter; the garden is silver." for at in range(300)}


@pytest.mark.parametrize("language", ["auto", "none", "english", "german", "russian"])
def test_every_word_is_found_alone_and_among_english_documents(tmp_path, language: str) -> None:
    for around in ({}, PLAIN):
        path = tmp_path / f"{len(around)}"
        build(path, {**around, **{text: text for text in ODD}}, language=language)
        for text, queries in ODD.items():
            for query in queries.split():
                assert found(path, query)[:1] == [text], query


WRITTEN = {
    "C++": "Templates of C++, and their parts.",
    "C#": "(C#) has generics.",
    "F#": "Pipes in F#.",
    ".NET": "The .NET runtime",
    "snake_case": "call the snake_case function",
    "getUserName": "it is getUserName, which fails",
    "HTTPServer": "class HTTPServer of the library",
    "x86-64": "made for x86-64 only",
    "2.14.3": "It was mended in 2.14.3.",
    "3.14.2": "It was broken in 3.14.2, and by 14 of 14 people.",
    "E0499": "error[E0499]: borrowed twice",
    "0x80070005": "It ends with 0x80070005.",
    "ORA-00942": "ORA-00942: no table",
    "plain": "c and f, net, snake, a case, x86 of 64, user, name, 14, ora, server",
}
PARTS = {"net": ".NET", "snake case": "snake_case", "user name": "getUserName", "http": "HTTPServer", "x86": "x86-64"}
PARTS |= {"2.14": "2.14.3", "v2.14.3": "2.14.3", "00942": "ORA-00942", "getusername": "getUserName"}


@pytest.mark.parametrize("language", ["auto", "german"])
def test_what_is_written_together_is_found_as_written_first_and_in_parts(tmp_path, language: str) -> None:
    build(tmp_path, PLAIN | WRITTEN, language=language)
    for name in WRITTEN.keys() - {"plain"}:
        assert found(tmp_path, name)[:1] == found(tmp_path, f"what is {name}?")[:1] == [name]
    for query, name in PARTS.items():
        assert name in found(tmp_path, query), query


def test_a_named_language_stems_and_drops_no_words_of_another(tmp_path) -> None:
    texts = {"a": "Die Häuser der Stadt", "b": "The is and a", "c": "東京タワー"}
    info = build(tmp_path / "de", texts, language="german")
    assert info.language == "german"
    assert found(tmp_path / "de", "haus") == ["a"]
    assert found(tmp_path / "de", "the") == ["b"]
    assert found(tmp_path / "de", "京タワ") == ["c"]
    build(tmp_path / "none", texts, language="none")
    assert found(tmp_path / "none", "haus") == []
    assert found(tmp_path / "none", "häuser") == ["a"]
    others = (build(tmp_path / "x", texts, language=each).index_hash for each in ("none", "english", "auto"))
    assert len({info.index_hash, *others}) == 4


def test_an_index_with_terms_of_an_earlier_version_is_refused_with_the_command_that_builds_it(
    tmp_path,
) -> None:
    """As a folder whose `index.json` knows no analyser, and of which `auto` was English."""
    built = build(tmp_path, JAPANESE)
    (file,) = tmp_path.glob("gen-*/index.json")
    manifest = msgspec.json.decode(file.read_bytes())
    del manifest["analyser"], manifest["info"]["language"]
    file.write_bytes(msgspec.json.encode(manifest))
    told = rf"has the terms of an earlier version: .* harness1 index SOURCE --out {tmp_path} --force"
    for work in (open_index, partial(add_documents, documents(OTHERS)), partial(delete_documents, ["cat"])):
        with pytest.raises(OutdatedIndex, match=told):
            work(tmp_path)
    assert build(tmp_path, JAPANESE) == built


def test_an_index_depends_on_what_it_holds_not_on_how_it_came_there(tmp_path) -> None:
    """Grown by additions and deletions, with merges, against one build of the same."""
    rng = random.Random(5)
    latin = {f"en{at}": " ".join(("rivers", "stones", *rng.choices(("river", "東京都"), k=3))) for at in range(150)}
    few = {"ja0": JAPANESE["tower"], "ja1": JAPANESE["fuji"]}
    build(tmp_path / "grown", dict([*latin.items()][:100]))
    for step in (dict([*latin.items()][100:]), few):
        info = add_documents(documents(step), tmp_path / "grown")
    whole = latin | few
    for order in (whole, dict(reversed(whole.items()))):
        assert build(tmp_path / "whole", order) == info
    for query in ("東京", "rivers 京都", "富士山"):
        assert ranked(tmp_path / "grown", query) == ranked(tmp_path / "whole", query) != []
    info = delete_documents([DocId("ja0")], tmp_path / "grown")
    del whole["ja0"]
    assert info == build(tmp_path / "less", whole)
    for query in ("東京都", "rivers 富士山", JAPANESE["fuji"]):
        assert ranked(tmp_path / "grown", query) == ranked(tmp_path / "less", query)


def test_an_unknown_language_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"index.language=klingon: give one of auto, none, arabic, .*german.*yiddish"):
        load_config(None, ["index.language=klingon"])
