"""Small office documents, books and PDF files, written from their parts."""

import io
import zipfile

from tests.data import hostile

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
SHEET = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
RELATIONS = "http://schemas.openxmlformats.org/package/2006/relationships"
DRAWING = "http://schemas.openxmlformats.org/drawingml/2006/main"
SLIDES = "http://schemas.openxmlformats.org/presentationml/2006/main"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"


def packed(files: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def links(*targets: tuple[str, str]) -> str:
    inner = [
        f'<Relationship Id="r{number}" Type="{OFFICE}/{kind}" Target="{target}"/>'
        for number, (kind, target) in enumerate(targets, start=1)
    ]
    return f'<Relationships xmlns="{RELATIONS}">{"".join(inner)}</Relationships>'


TYPES = (
    '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"><Default Extension="rels"'
    ' ContentType="application/vnd.openxmlformats-package.relationships+xml"/><Default Extension="xml"'
    ' ContentType="application/xml"/></Types>'
)


def docx(body: str) -> bytes:
    return packed({
        "[Content_Types].xml": TYPES,
        "_rels/.rels": links(("officeDocument", "word/document.xml")),
        "word/document.xml": f'<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>',
    })  # fmt: skip


def paragraph(text: str) -> str:
    return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"


def xlsx(**sheets: list[list[str]]) -> bytes:
    files = {"[Content_Types].xml": TYPES, "_rels/.rels": links(("officeDocument", "xl/workbook.xml"))}
    named = "".join(f'<sheet name="{name}" sheetId="{at}" r:id="r{at}"/>' for at, name in enumerate(sheets, start=1))
    files["xl/workbook.xml"] = f'<workbook xmlns="{SHEET}" xmlns:r="{OFFICE}"><sheets>{named}</sheets></workbook>'
    targets = [("worksheet", f"worksheets/sheet{at}.xml") for at in range(1, len(sheets) + 1)]
    files["xl/_rels/workbook.xml.rels"] = links(*targets)
    for at, rows in enumerate(sheets.values(), start=1):
        cells = "".join(
            "<row>" + "".join(f'<c t="inlineStr"><is><t>{cell}</t></is></c>' for cell in row) + "</row>" for row in rows
        )
        files[f"xl/worksheets/sheet{at}.xml"] = f'<worksheet xmlns="{SHEET}"><sheetData>{cells}</sheetData></worksheet>'
    return packed(files)


def epub(text: str, title: str = "The Lighthouse") -> bytes:
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf" version="3.0"><metadata'
        f' xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>{title}</dc:title></metadata><manifest><item'
        ' id="a" href="a.xhtml" media-type="application/xhtml+xml"/></manifest><spine><itemref idref="a"/></spine>'
        "</package>"
    )
    container = (
        '<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles><rootfile'
        ' full-path="c.opf" media-type="application/oebps-package+xml"/></rootfiles></container>'
    )
    page = f'<html xmlns="http://www.w3.org/1999/xhtml"><body><p>{text}</p></body></html>'
    files = {"mimetype": "application/epub+zip", "META-INF/container.xml": container, "c.opf": package, "a.xhtml": page}
    return packed(files)


def odf(kind: str, inner: str) -> bytes:
    names = "".join(
        f' xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"' for name in ("office", "table", "text")
    )
    body = f"<office:body><office:{kind}>{inner}</office:{kind}></office:body>"
    content = f"<office:document-content{names}>{body}</office:document-content>"
    media, named = f"application/vnd.oasis.opendocument.{kind}", "urn:oasis:names:tc:opendocument:xmlns:manifest:1.0"
    parts = "".join(
        f'<m:file-entry m:full-path="{path}" m:media-type="{each}"/>'
        for path, each in (("/", media), ("content.xml", "text/xml"))
    )
    manifest = f'<m:manifest xmlns:m="{named}">{parts}</m:manifest>'
    return packed({"mimetype": media, "content.xml": content, "META-INF/manifest.xml": manifest})


def odt(*paragraphs: str) -> bytes:
    return odf("text", "".join(f"<text:p>{each}</text:p>" for each in paragraphs))


def ods(**sheets: list[list[str]]) -> bytes:
    tables = ""
    for name, rows in sheets.items():
        cells = (
            "".join(
                f'<table:table-cell office:value-type="string"><text:p>{cell}</text:p></table:table-cell>'
                for cell in row
            )
            for row in rows
        )
        inner = "".join(f"<table:table-row>{each}</table:table-row>" for each in cells)
        tables += f'<table:table table:name="{name}">{inner}</table:table>'
    return odf("spreadsheet", tables)


UNNAMED = '<p:nv{0}Pr><p:cNvPr id="2" name=""/><p:cNv{0}Pr/><p:nvPr/></p:nv{0}Pr>'


def pptx(*slides: list[str]) -> bytes:
    """Slides, each of a title and lines."""
    names = f'xmlns:a="{DRAWING}" xmlns:p="{SLIDES}" xmlns:r="{OFFICE}"'
    shown = "".join(f'<p:sldId id="{255 + at}" r:id="r{at}"/>' for at in range(1, len(slides) + 1))
    files = {"[Content_Types].xml": TYPES, "_rels/.rels": links(("officeDocument", "ppt/presentation.xml"))}
    files["ppt/presentation.xml"] = f"<p:presentation {names}><p:sldIdLst>{shown}</p:sldIdLst></p:presentation>"
    files["ppt/_rels/presentation.xml.rels"] = links(
        *(("slide", f"slides/slide{at}.xml") for at in range(1, len(slides) + 1))
    )
    for at, lines in enumerate(slides, start=1):
        text = "".join(f"<a:p><a:r><a:t>{line}</a:t></a:r></a:p>" for line in lines)
        shape = f"<p:sp>{UNNAMED.format('Sp')}<p:spPr/><p:txBody><a:bodyPr/>{text}</p:txBody></p:sp>"
        tree = f"<p:cSld><p:spTree>{UNNAMED.format('GrpSp')}<p:grpSpPr/>{shape}</p:spTree></p:cSld>"
        files[f"ppt/slides/slide{at}.xml"] = f"<p:sld {names}>{tree}</p:sld>"
    return packed(files)


def rtf(*paragraphs: str) -> bytes:
    lines = ("".join(map(_in_rtf, memoryview(each.encode("utf-16-le")).cast("H"))) for each in paragraphs)
    return ("{\\rtf1\\ansi\\deff0 " + "\\par ".join(lines) + "\\par}").encode()


def _in_rtf(unit: int) -> str:
    is_plain = 32 <= unit < 127 and chr(unit) not in "\\{}"
    return chr(unit) if is_plain else f"\\u{unit - 65536 if unit > 32767 else unit}?"


def pdf(*pages: list[str]) -> bytes:
    """Pages of lines in any script, in a font that is not within, with the characters of its codes."""
    used = sorted({ord(letter) for lines in pages for line in lines for letter in line})
    known = "".join(f"1 beginbfchar <{code:04x}> <{code:04x}> endbfchar\n" for code in used)
    kids = " ".join(f"{6 + 2 * at} 0 R" for at in range(len(pages)))
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>",
        "<</Type/Font/Subtype/Type0/BaseFont/F/Encoding/Identity-H/DescendantFonts[4 0 R]/ToUnicode 5 0 R>>",
        "<</Type/Font/Subtype/CIDFontType2/BaseFont/F/DW 600"
        "/CIDSystemInfo<</Registry(Adobe)/Ordering(Identity)/Supplement 0>>>>",
        stream(f"begincmap 1 begincodespacerange <0000> <ffff> endcodespacerange\n{known}endcmap"),
    ]
    for at, lines in enumerate(pages):
        size = f"/MediaBox[0 0 595 842]/Resources<</Font<</F 3 0 R>>>>/Contents {7 + 2 * at} 0 R"
        objects.append(f"<</Type/Page/Parent 2 0 R{size}>>")
        shown = " T* ".join(f"<{line.encode('utf-16-be').hex()}> Tj" for line in lines)
        objects.append(stream(f"BT /F 11 Tf 14 TL 50 780 Td {shown} ET"))
    return hostile.pdf(*map(str.encode, objects))


def stream(text: str) -> str:
    return f"<</Length {len(text)}>>\nstream\n{text}\nendstream"
