"""The pieces of a page: style, badges, tables. Whatever text comes in is escaped here, except `Html`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from mlpipe.observe.svg import COLOURS


class Html(str):
    """Text that is markup already. Everything else is a user's text until escaped."""

    __slots__ = ()


def text(value: object) -> Html:
    """Escaped for element content and for quoted attributes; None is a dash."""
    if isinstance(value, Html):
        return value
    return Html("–" if value is None else escape(str(value)))


def element(name: str, content: object, css: str = "") -> Html:
    start = f'<{name} class="{css}">' if css else f"<{name}>"
    return Html(f"{start}{text(content)}</{name}>")


def join(parts: Iterable[object]) -> Html:
    return Html("".join(text(part) for part in parts))


def badge(state: str) -> Html:
    known = ("done", "running", "failed", "cancelled")
    return Html(f'<span class="badge {state if state in known else "other"}">{text(state)}</span>')


def link(url: str) -> Html:
    """To be clicked on; only what a browser fetches by HTTP is one, the rest stays text."""
    if not url.startswith(("https://", "http://")):
        return text(url)
    return Html(f'<a href="{text(url)}" rel="noreferrer">{text(url)}</a>')


def table(head: Sequence[str], rows: Iterable[Sequence[object]], numbers: Iterable[int] = ()) -> Html:
    """`numbers`: columns that hold numbers, aligned to the right."""
    right = set(numbers)
    css = ["n" if index in right else "" for index in range(len(head))]
    top = join(element("th", name, css[index]) for index, name in enumerate(head))
    body = join(
        element("tr", join(element("td", cell, css[index]) for index, cell in enumerate(row))) for row in rows
    )
    return Html(
        f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def facts(pairs: Mapping[str, object]) -> Html:
    """Name and value, one a line; what is None is left out."""
    rows = join(
        join((element("dt", name), element("dd", value)))
        for name, value in pairs.items()
        if value not in (None, "")
    )
    return element("dl", rows)


def tiles(pairs: Mapping[str, object]) -> Html:
    """Few large numbers side by side; what is None is left out."""
    parts = [
        element("div", join((element("b", value), " ", element("span", name))), "tile")
        for name, value in pairs.items()
        if value is not None
    ]
    return element("div", join(parts), "tiles") if parts else Html("")


def details(summary: str, content: Html, *, open_: bool = False) -> Html:
    start = '<details class="card" open>' if open_ else '<details class="card">'
    return Html(f"{start}<summary>{text(summary)}</summary>{content}</details>")


def utc(seconds: float | None) -> str | None:
    """Unix seconds as `2026-11-21 12:30:05`, in UTC, with a space that does not break."""
    return None if seconds is None else time.strftime("%Y-%m-%d\u00a0%H:%M:%S", time.gmtime(seconds))


def when(seconds: float | None) -> Html | None:
    """The same for a table, on one line however narrow."""
    return None if seconds is None else element("time", utc(seconds))


def page(title: str, body: Html) -> str:
    """The whole document. Its policy forbids the browser to load or run anything."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{_style()}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _style() -> str:
    light = "".join(f"--{name}:{colours[0]};" for name, colours in COLOURS.items())
    dark = "".join(f"--{name}:{colours[1]};" for name, colours in COLOURS.items())
    marks = "".join(f".s-{name}{{stroke:var(--{name})}}.f-{name}{{fill:var(--{name})}}" for name in COLOURS)
    root = f":root{{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--text:#1c2128;{light}}}"
    night = (
        f"@media(prefers-color-scheme:dark){{:root{{--page:#15191e;--card:#1c2128;--text:#e6eaef;{dark}}}}}"
    )
    return root + night + _LAYOUT + marks


_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_LAYOUT = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{overflow-wrap:anywhere;max-width:76rem;margin:0 auto;padding:1.5rem 1rem 3rem}
h1{font-size:1.5rem;margin:0 .6rem 0 0;display:inline;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.2rem 0 .7rem}
h3{font-size:.95rem;margin:0 0 .1rem}
h4{font-size:.95rem;margin:1.3rem 0 .4rem}
p{margin:.4rem 0}
a{color:var(--blue)}
.faint,dt,.tile span,th,footer{color:var(--faint)}
.badge{font-size:.8rem;font-weight:600;padding:.1rem .55rem;border-radius:1rem;
 border:1.5px solid var(--faint);color:var(--faint);white-space:nowrap}
h1+.badge{vertical-align:.2rem}
.badge.done{color:var(--green);border-color:var(--green)}
.badge.running{color:var(--blue);border-color:var(--blue)}
.badge.failed{color:var(--red);border-color:var(--red)}
.badge.cancelled{color:var(--amber);border-color:var(--amber)}
.card,.tile{background:var(--card);border:1px solid var(--line);border-radius:.6rem;
 padding:.8rem 1rem;margin:.7rem 0}
.trouble{border-left:4px solid var(--red)}
.trouble pre{margin:.4rem 0 0}
.tiles{display:flex;flex-wrap:wrap;gap:.7rem;margin:.7rem 0}
.tile{margin:0;flex:1 1 8rem;padding:.6rem .9rem}
.tile b{display:block;font-size:1.3rem;font-weight:600;font-variant-numeric:tabular-nums;
 white-space:nowrap}
.tile span{font-size:.82rem}
.charts{display:grid;gap:.7rem;margin:.7rem 0;
 grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr))}
.charts .card{margin:0}
.chart{display:block;width:100%;height:auto;font-family:inherit}
.legend{font-size:.78rem;color:var(--faint);display:flex;flex-wrap:wrap;gap:.1rem .75rem;min-height:1.3rem}
.legend svg{margin-right:.3rem;vertical-align:-.05rem}
.h:hover circle{opacity:1}
.h:hover .z{fill:var(--line);opacity:.5}
.b:hover{opacity:.75}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.3rem 1.3rem .3rem 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:500;white-space:nowrap}
td{overflow-wrap:break-word}
td pre,td code{overflow-wrap:anywhere}
.n{text-align:right;white-space:nowrap}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1.2rem;margin:.4rem 0;font-size:.92rem}
dd{margin:0;overflow-wrap:anywhere}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.4rem 0;
 font:13px/1.45 ui-monospace,Menlo,Consolas,monospace}
tr:last-child td{border-bottom:0}
details .scroll{margin-top:.4rem}
time{white-space:nowrap}
summary{cursor:pointer;font-weight:500}
.bar{display:block;width:100%;height:.8rem;min-width:10rem;border-radius:.2rem;margin-top:.35rem}
footer{font-size:.82rem;margin-top:2rem}
@media(max-width:40rem){main{padding:1rem .6rem 2rem}.card{padding:.7rem .75rem}
 table{font-size:.82rem}th,td{padding-right:.8rem}td:last-child:not(.n){min-width:9rem}
 dl{column-gap:.8rem}.tile{flex-basis:7rem}}
@media print{body{background:none}.card,.tile{break-inside:avoid}}
"""
