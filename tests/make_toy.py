"""Write the data set `dataset/toy` (the rule of its rankings is told in properties/dataset/toy.yaml).

python tests/make_toy.py [folder]
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

USERS, RING = 60, 10
CATEGORIES = ("Lamps", "Chairs", "Teapots", "Clocks", "Rugs", "Vases", "Mirrors", "Shelves")
NOUNS = ("Lamp", "Chair", "Teapot", "Clock", "Rug", "Vase", "Mirror", "Shelf")
BRANDS = ("Aldine", "Borea", "Corvo", "Delphin")
COLOURS = ("Amber", "Blue", "Coral", "Dove", "Ebony", "Fern", "Gold", "Hazel", "Ivory", "Jade")


def item_token(category: int, place: int) -> str:
    """External id of the item at `place` (0 to 9) of a category's ring."""
    return f"i{category * RING + place + 1}"


def history(rng: random.Random) -> list[str]:
    """One user's items in time order: in each of 2 or 3 categories a walk of 4 to 6 steps round its ring."""
    items: list[str] = []
    for category in rng.sample(range(len(CATEGORIES)), rng.choice((2, 3))):
        start = rng.randrange(RING)
        items += [item_token(category, (start + step) % RING) for step in range(rng.choice((4, 5, 6)))]
    return items


def write_toy(folder: Path) -> None:
    """Write toy.inter and toy.item into `folder`; the same bytes on every machine."""
    rng = random.Random(7)
    inter = ["user_id:token\titem_id:token\ttimestamp:float"]
    for user in range(1, USERS + 1):
        begin = 1_000_000 + 10_000 * user
        inter += [f"u{user}\t{item}\t{begin + 60 * step}" for step, item in enumerate(history(rng))]
    items = ["item_id:token\ttitle:token_seq\tcategories:token_seq\tbrand:token"]
    for index in range(len(CATEGORIES) * RING):
        category, place = divmod(index, RING)
        title = f"{COLOURS[place]} {NOUNS[category]} No. {place + 1}"
        items.append(
            f"{item_token(category, place)}\t{title}\tHome {CATEGORIES[category]}\t{BRANDS[index % 4]}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("toy.inter", inter), ("toy.item", items)):
        (folder / name).write_bytes(("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    write_toy(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "dataset" / "toy")
