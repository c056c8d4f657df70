"""Hostile tar files, generated: headers whose sizes, kinds, names and checksums lie."""

import random

BLOCK = 512
SIZES = (
    b"00000000003\0", b"00000000000\0", b"-0000001000\0", b"-0000002000\0", b"-1\0", b"-0\0", b"+3\0",
    b"77777777777\0", b"777777777777", b"\0" * 12, b" " * 12, b"3 \0", b"0o17\0", b"1_0\0", b"9\0", b"abc\0",
    "٣".encode(), b"\x80" + bytes(10) + b"\x03", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"\xff" * 10 + b"\xfe\0",
    b"\xff" * 10 + b"\xfc\0", b"\xff" + bytes(11), b"\x80" + bytes(3) + b"\x7f" + b"\xff" * 7, b"\xc0" + bytes(11),
    b"\xff" * 9 + b"\x80\0\0",
)  # fmt: skip
NAMES = (
    b"a.jpg", b"a.jpg", b"b.jpg", b"a.cls", b"a.b.c.jpg", b".jpg", b".hidden.jpg", b"", b".", b"./", b"..",
    b"../x.jpg", b"/x.jpg", b"//x.jpg", b"d/a.jpg", b"d/", b"d/.", b"d//a.jpg", b"./a.jpg", b"././/a.jpg",
    b"d/./a.jpg", b"d/../a.jpg", b"A.JPG", b"\xff\xfe.jpg", b"a\nb.jpg", b"a\x1b[2J.jpg", b"a.jpg ", b" a.jpg",
    "é.jpg".encode(), "e\u0301.jpg".encode(), b"con.jpg", b"a\\b.jpg", b"x" * 96 + b".jpg", b"y/" * 48 + b".jpg",
    b"C:x.jpg",
)  # fmt: skip
RECORDS = (
    b"path=p.jpg", b"path=", b"path=../p.jpg", b"path=/p.jpg", b"path=a\0b.jpg", b"path=a.jpg", b"size=3",
    b"size=-512", b"size=-1024", b"size=99999999999999999999", b"size=0", b"size=", b"size=abc", b"size=1_0",
    b"size=3.0", b"mtime=1", b"novalue", b"=empty", b"GNU.sparse.major=1", b"linkpath=x", b"hdrcharset=BINARY",
    b"GNU.sparse.name=q.jpg", b"path=" + b"z" * 300,
)  # fmt: skip
LENGTHS = (b"0", b"-1", b"-20", b"1", b"3", b"99999", b"9" * 5000, b"", b"abc", b"0x10", b"1_1")


def header(name: bytes, size: bytes, kind: bytes, *, magic: bytes, prefix: bytes = b"", wrong: int = 0) -> bytes:
    """A header of ustar, GNU or the oldest format, whose checksum may be ``wrong``."""
    out = bytearray(BLOCK)
    out[0:100] = name[:100].ljust(100, b"\0")
    out[100:124] = b"0000644\0" + b"0000000\0" * 2
    out[124:136] = size[:12].ljust(12, b"\0")
    out[136:156] = b"00000000000\0" + b" " * 8
    out[156:157] = kind
    out[257:265] = magic
    out[345:500] = prefix.ljust(155, b"\0")
    out[148:156] = b"%06o\0 " % (sum(out) + wrong)
    return bytes(out)


def records(texts: list[bytes], rng: random.Random, *, lie: bool) -> bytes:
    """The body of a pax header; where it lies, one of its lengths does."""
    body = b""
    for text in texts:
        length = len(text) + 3
        while len(b"%d %s\n" % (length, text)) != length:
            length += 1
        body += (rng.choice(LENGTHS) if lie else b"%d" % length) + b" " + text + b"\n"
    return body


def tar(seed: int, number: int) -> bytes:
    """Tar ``number`` of a seed: up to a dozen members, of which one or two lie somewhere."""
    rng = random.Random(f"tar {seed} {number}")
    count = rng.choice((1, 2, 3, 5, 12))
    liars = rng.sample(range(count), min(count, rng.choice((0, 1, 1, 2))))
    magic = rng.choice((b"ustar\x0000", b"ustar\x0000", b"ustar  \0", bytes(8)))
    out = bytearray()
    for k in range(count):
        lie = rng.choice(("size", "size", "size", "name", "kind", "prefix", "checksum", "record", "body")) * (
            k in liars
        )
        kind = rng.choice((b"0", b"0", b"0", b"5", b"L", b"K", b"x", b"g"))
        name = b"%03d/" % k if kind == b"5" else b"%03d.jpg" % k
        body = rng.randbytes(rng.choice((0, 3, 511, 512, 513, 2000)))
        if kind == b"5":
            body = b""
        elif kind in b"xg":
            text = rng.choice(RECORDS) if lie in ("name", "body") else b"mtime=%d" % k
            body = records([text] * rng.choice((1, 2)), rng, lie=lie == "record")
        elif kind in b"LK":
            names = (b"x" * 150 + b".jpg\0", b"../up.jpg\0", b"", b"\0", b"l.jpg", b"n/" * 3000 + b".jpg\0")
            body = rng.choice(names) if lie in ("name", "body") else b"%03d/%s.jpg\0" % (k, b"y" * 120)
        out += header(
            rng.choice(NAMES) if lie == "name" else name,
            rng.choice(SIZES) if lie == "size" else b"%011o\0" % len(body),
            rng.choice((b"\0", b"7", b"1", b"2", b"3", b"4", b"6", b"S", b"Z", b"V", b"M", b"D", b"A"))
            if lie == "kind"
            else kind,
            magic=magic,
            prefix=rng.choice((b"pre", b"../up", b"/root", b"d/")) if lie == "prefix" else b"",
            wrong=int(lie == "checksum"),
        )
        out += body + bytes(-len(body) % BLOCK)
    if rng.random() < 0.9:
        out += bytes(2 * BLOCK)
    for _ in range(rng.choice((0, 0, 0, 0, 1))):
        at = rng.randrange(len(out) + 1)
        damage = rng.choice(("cut", "flip", "insert", "repeat"))
        if damage == "cut":
            del out[at:]
        elif damage == "flip" and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif damage == "insert":
            out[at:at] = rng.randbytes(rng.choice((1, 511, 512)))
        else:
            out += out[at // BLOCK * BLOCK :]
    return bytes(out)
