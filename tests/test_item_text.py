"""Item text from atomic files as they come: quotes, tabs, other line ends, gaps, and files that are no tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from recbole_dgr2.data.item_text import ItemFields, ItemText, load_item_text

HEADER = "item_id:token\ttitle:token_seq\tcats:token_seq\tbrand:token\n"
FIELDS = ItemFields("title", "cats", "brand")
TOKENS = ["[PAD]", "a", "b", "c"]


def read(tmp_path: Path, text: str | bytes, fields: ItemFields = FIELDS) -> ItemText:
    path = tmp_path / "x.item"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_item_text(path, fields, TOKENS)


def test_a_file_is_read_by_item_token(tmp_path: Path) -> None:
    text = read(tmp_path, HEADER + "b\tBlue Lamp\tHome Floor_Lamps\tBorea\nx\tX\tY\tZ\na\tRed\tHome\t\n")
    assert len(text) == 4
    assert text.titles == ("", "Red", "Blue Lamp", "")
    assert text.categories == ((), ("Home",), ("Home", "Floor Lamps"), ())
    assert text.brands == ("", "", "Borea", "")
    assert text.document(2) == "Blue Lamp Home Floor Lamps Borea"


@pytest.mark.parametrize(
    "written,title",
    [
        ('5" nail "file', '5" nail "file'),
        ('"whole"', '"whole"'),
        ('"starts and never ends', '"starts and never ends'),
        ('"a\tb"', "a\tb"),  # a quoted tab is the only reason to read quotes as quotes
        ("NA", "NA"),
        ("crème brûlée 日本 😀", "crème brûlée 日本 😀"),
        ("  spaces  ", "spaces"),
        ("$kinds {} %s", "$kinds {} %s"),
    ],
)
def test_titles_survive(tmp_path: Path, written: str, title: str) -> None:
    for end in ("\n", "\r\n"):
        text = (HEADER + f"a\t{written}\tk\tB\nb\tplain\tk\tB\n").replace("\n", end)
        assert read(tmp_path, text).titles == ("", title, "plain", "")
        assert read(tmp_path, text).brands == ("", "B", "B", "")


def test_short_lines_and_blank_lines(tmp_path: Path) -> None:
    text = read(tmp_path, HEADER + "\na\tshort\n\nb\tlong\tk\tB\n")
    assert text.titles == ("", "short", "long", "")
    assert text.categories == ((), (), ("k",), ())
    assert read(tmp_path, HEADER).titles == ("",) * 4
    assert read(tmp_path, b"\xef\xbb\xbf" + (HEADER + "a\tx\tk\tB\n").encode()).titles[1] == "x"


def test_no_text_columns_need_no_file(tmp_path: Path) -> None:
    text = load_item_text(tmp_path / "absent.item", ItemFields(), TOKENS)
    assert (text.titles, text.categories, text.brands) == (("",) * 4, ((),) * 4, ("",) * 4)
    assert ItemFields(title="t", brand="b").named() == {"title": "t", "brand": "b"}


def test_a_title_is_never_empty() -> None:
    text = ItemText(("", "", ""), ((), ("Home", "Lamps"), ()), ("", "Borea", ""))
    assert [text.title(item) for item in range(3)] == ["unknown item", "Borea Lamps", "unknown item"]


@pytest.mark.parametrize(
    "text,fields,message",
    [
        ("", FIELDS, r"x\.item: the file is empty; expected a header line"),
        ("\n\n", FIELDS, r"x\.item: not a table of tab-separated columns"),
        (HEADER + "a\t1\tk\tB\textra\n", FIELDS, r"x\.item: not a table of tab-separated columns"),
        (b"\xff\xfe\x00", FIELDS, r"x\.item: not a table .*can't decode"),
        (
            HEADER,
            ItemFields("titel"),
            "no column 'titel'; it has item_id, title, cats, brand; did you mean 'title'",
        ),
        (HEADER, ItemFields("zzz"), "no column 'zzz'; it has item_id, title, cats, brand$"),
        ("id:token\ttitle:token\n", ItemFields("title"), "no column 'item_id'"),
        (HEADER + "a\t1\tk\tB\na\t2\tk\tB\n", FIELDS, "item 'a' stands on more than one line"),
    ],
)
def test_bad_files(tmp_path: Path, text: str | bytes, fields: ItemFields, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path, text, fields)
    assert "\n" not in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"x\.item: no such file, but title_field, .* set these keys to null"
    ):
        load_item_text(tmp_path / "x.item", ItemFields("title"), TOKENS)
