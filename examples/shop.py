"""A small shop on SQLite: each order and its event are written in one transaction, or not at all.

Run it with `make demo`. Everything happens in a temporary folder.
"""

import contextlib
import json
import os
import shlex
import sqlite3
import sys
import tempfile

from oncebox import Outbox
from oncebox.cli import main as command_line

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
    with tempfile.TemporaryDirectory(prefix="oncebox-shop-") as folder, contextlib.chdir(folder):
        os.environ["ONCEBOX_STORE"] = "sqlite:///shop.db"
        an_outbox_in_the_shops_database()
        with contextlib.closing(sqlite3.connect("shop.db")) as shop:
            orders_and_events_in_one_transaction(shop)
            an_operator_acts(shop)
    say("That was it. `oncebox --help` shows every command, and README.md says where to read on.")


def an_outbox_in_the_shops_database() -> None:
    say("1. The outbox lives in the shop's own database.")
    oncebox("init")


def orders_and_events_in_one_transaction(shop: sqlite3.Connection) -> None:
    say("2. Each order and its event go into one transaction.")
    shop.execute("create table orders (id integer primary key, item text not null)")
    place_order(shop, 1, "a kettle")
    print("order 1, a kettle: committed")
    place_order(shop, 2, "tea")
    print("order 2, tea:      committed")
    try:
        place_order(shop, 3, "a boat", card_works=False)
    except CardDeclined:
        print("order 3, a boat:   card declined, rolled back")

    say("3. The rollback took both: there is no order 3, and no event of it.")
    orders = [order for (order,) in shop.execute("select id from orders order by id")]
    print(f"orders in the shop: {orders}\n")
    oncebox("list")
    payloads = shop.execute("select payload from outbox order by seq")
    assert [json.loads(payload)["order"] for (payload,) in payloads] == orders == [1, 2]


def an_operator_acts(shop: sqlite3.Connection) -> None:
    say("4. An operator gives up an event: it is DEAD, and no relay will send it.")
    (tea,) = shop.execute("select event_id from outbox where ordering_key = 'order-2'").fetchone()
    oncebox("kill", tea, "--reason", "the tea is sold out", "--yes")
    oncebox("stats")

    say("5. New tea has come: the event goes back to PENDING, ready to be sent.")
    oncebox("replay", "--state", "DEAD", "--why", "new tea has come", "--yes")
    oncebox("stats")
    assert shop.execute("select state, count(*) from outbox group by state").fetchall() == [("PENDING", 2)]

    say("6. Who did what, when and why is written down.")
    oncebox("audit")


def say(text: str) -> None:
    bold, plain = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    print(f"\n{bold}{text}{plain}\n")


def oncebox(*words: str) -> None:
    """Show a command, and run it as a shell would."""
    print(f"$ oncebox {shlex.join(words)}", flush=True)
    if code := command_line(words):
        sys.exit(code)


if __name__ == "__main__":
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", "100")
    main()
