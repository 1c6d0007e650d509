"""Item text from atomic files as they come: quotes, tabs, other line ends, gaps, and files that are no tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from recbole_dgr2.data.item_text import ItemFields, ItemText, load_item_text, split_categories

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
    "written,kind,found",
    [
        ("Home Floor_Lamps", "token_seq", ("Home", "Floor Lamps")),
        ("Home Floor_Lamps", "", ("Home", "Floor Lamps")),
        ("Coffee & Tea", "token", ("Coffee & Tea",)),
        ("12.0 7.0 2.5", "float_seq", ("12", "7", "2.5")),
        ("3.0", "float", ("3",)),
        ("['Beauty', 'Hair Care']", "token_seq", ("Beauty", "Hair Care")),
        ('["Beauty", "Caf\\u00e9"]', "token_seq", ("Beauty", "Café")),
        ("[['Beauty', 'Hair'], ['Beauty', 'Skin']]", "token", ("Beauty", "Hair", "Skin")),
        ("""['Beauty', "Women's \\d"]""", "token", ("Beauty", "Women's \\d")),
        ("['Beauty' 'Hair Care']", "token_seq", ("Beauty", "Hair Care")),
        ("'Beauty', 'Hair Care'", "token_seq", ("Beauty", "Hair Care")),
        ("[Beauty, Hair Care]", "token_seq", ("Beauty", "Hair Care")),
        ("[1, 2]", "float_seq", ("1", "2")),
        ("[None, 'a_b', '']", "token", ("a_b",)),
        ("Beauty > Hair Care >Dry", "token", ("Beauty", "Hair Care", "Dry")),
        ("Beauty|Hair_Care|Beauty", "token_seq", ("Beauty", "Hair Care")),
        ("Food, Coffee & Tea", "token_seq", ("Food", "Coffee & Tea")),
        ('"Best" of "Rest"', "token", ('"Best" of "Rest"',)),
        ("['unfinished", "token", ("['unfinished",)),
        ("[" * 5000 + "]" * 5000, "token_seq", ("[" * 4999 + "]" * 4999,)),
        ("", "token_seq", ()),
        ("[]", "token", ()),
        ("nan", "token", ()),
    ],
)
def test_categories_in_many_forms(written: str, kind: str, found: tuple[str, ...]) -> None:
    assert split_categories(written, kind) == found


def test_the_type_of_the_column_decides(tmp_path: Path) -> None:
    for kind, found in (
        ("token_seq", ("Floor Lamps", "Home")),
        ("token", ("Floor Lamps Home",)),
        ("", ("Floor Lamps", "Home")),
    ):
        header = f"item_id:token\tcats{':' if kind else ''}{kind}\n"
        text = read(tmp_path, header + "a\tFloor_Lamps Home\n", ItemFields(category="cats"))
        assert text.categories[1] == found


def test_entities_and_gaps(tmp_path: Path) -> None:
    lines = (
        "a\tAT&amp;T &quot;x&quot; &amp;amp; y&nbsp;\tHair_&amp;_Skin &lt;b&gt;\tL&#39;Or&eacute;al\n"
        "b\tnan\tNone\tnull\nc\tNA\t[]\tNaN\n"
    )
    text = read(tmp_path, HEADER + lines)
    assert text.titles == ("", 'AT&T "x" & y', "", "NA")
    assert text.brands == ("", "L'Oréal", "", "")
    assert text.categories[2:] == ((), ())
    assert text.title(2) == "unknown item"


def test_semantic_ids() -> None:
    text = ItemText(("", "x"), ((), ()), ("", ""), {1: "<a_1><b_2>"})
    assert [text.sid(item) for item in range(2)] == ["", "<a_1><b_2>"]
    assert ItemText(("",), ((),), ("",)).sid(0) == ""


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
