"""A small shop on SQLite: each order and its event are written in one transaction, or not at all.

Run it with `make demo`. Everything happens in a temporary folder.
"""

import json
import os
import shlex
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from oncebox import Outbox

outbox = Outbox()


class CardDeclined(Exception):
    """The customer's bank said no."""


def place_order(shop: sqlite3.Connection, order: int, item: str, *, card_works: bool = True) -> None:
    with shop:  # one transaction: commits at its end, rolls back on an error
        shop.execute("insert into orders (id, item) values (?, ?)", (order, item))
        outbox.add(shop, "order.created", {"order": order, "item": item}, key=f"order-{order}")
        if not card_works:
            raise CardDeclined


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="oncebox-shop-") as folder:
        os.chdir(folder)
        os.environ["ONCEBOX_STORE"] = "sqlite:///shop.db"
        try:
            run_shop()
        finally:
            os.chdir(Path(__file__).parent)


def run_shop() -> None:
    say("1. The outbox lives in the shop's own database.")
    oncebox("init")

    say("2. Each order and its event go into one transaction.")
    with closing(sqlite3.connect("shop.db")) as shop:
        shop.execute("create table orders (id integer primary key, item text not null)")
        place_order(shop, 1, "a kettle")
        print("  order 1, a kettle:  committed")
        place_order(shop, 2, "tea")
        print("  order 2, tea:       committed")
        try:
            place_order(shop, 3, "a boat", card_works=False)
        except CardDeclined:
            print("  order 3, a boat:    card declined, rolled back")
        orders = [order for (order,) in shop.execute("select id from orders order by id")]

    say("3. The rollback took both: there is no order 3, and no event of it.")
    print(f"  orders in the shop: {orders}")
    oncebox("list")
    events = json.loads(answer("list", "--json"))
    assert [event["payload"]["order"] for event in events] == orders == [1, 2]

    say("4. An operator gives up an event: it is DEAD, and no relay will send it.")
    tea = events[1]["event_id"]
    oncebox("kill", tea, "--reason", "the tea is sold out", "--yes")
    oncebox("stats")

    say("5. New tea has come: the event goes back to PENDING, ready to be sent.")
    oncebox("replay", "--state", "DEAD", "--why", "new tea has come", "--yes")
    oncebox("stats")
    counted = json.loads(answer("stats", "--json"))["states"]
    assert counted == {"PENDING": 2, "CLAIMED": 0, "PUBLISHED": 0, "DEAD": 0}

    say("6. Who did what, when and why is written down.")
    oncebox("audit")

    say("That was it. `oncebox --help` shows every command; README.md says where to read on.")


def say(text: str) -> None:
    bold, plain = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    print(f"\n{bold}{text}{plain}", flush=True)


def oncebox(*words: str) -> None:
    """Show a command, and run it as an operator would."""
    print(f"  $ oncebox {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "oncebox", *words], check=True)


def answer(*words: str) -> bytes:
    return subprocess.run([sys.executable, "-m", "oncebox", *words], check=True, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    main()
