"""Files that aim at the readers of a corpus, and a guard against those that never end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LIMIT_S = 60
"""Far more than any reader takes, and far less than a quadratic one."""


@contextmanager
def ends() -> Iterator[None]:
    """Fail if what is inside goes on for a minute."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"it goes on after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pdf(*objects: bytes) -> bytes:
    """A PDF of numbered objects, the first of which is the catalogue; its table of them is right."""
    text, places = bytearray(b"%PDF-1.4\n"), []
    for number, content in enumerate(objects, start=1):
        places.append(len(text))
        text += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    start, size = len(text), len(objects) + 1
    text += b"xref\n0 %d\n0000000000 65535 f \n" % size
    text += b"".join(b"%010d 00000 n \n" % place for place in places)
    return bytes(text) + b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (size, start)


def page(stream: bytes, filters: bytes = b"") -> bytes:
    """A PDF of one page with this content."""
    return pdf(
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d %s>>\nstream\n%s\nendstream" % (len(stream), filters, stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    )
