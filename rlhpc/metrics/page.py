"""HTML elements of the report that do not depend on runs: frame, style, cards, tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlhpc.metrics.charts import CHART, STYLE, WIDE, Size, is_empty, statement
from rlhpc.runtime.disk_errors import unwritten_page_error
from rlhpc.runtime.files import replace_durably

Cell = str | int | float
_CONTROL_PICTURES = {char_code: 0x2400 + char_code for char_code in range(32) if chr(char_code) not in "\n\t"} | {
    127: 0x2421
}

_CSS = """
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);line-height:1.5;
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1240px;margin:0 auto;padding:36px 28px 64px}
header h1{font-size:30px;line-height:1.2;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}
header p{margin:6px 0 0;color:var(--muted)}
h2{font-size:19px;margin:44px 0 14px;padding-bottom:7px;border-bottom:1px solid var(--line)}
a{color:var(--c0)}h3{font-size:15px;margin:22px 0 8px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:14px;margin-top:26px}
.card{background:var(--soft);border:1px solid var(--line);border-radius:10px;padding:13px 16px;min-width:0}
.card b{display:block;font-size:26px;line-height:1.25;font-weight:650;white-space:nowrap;font-variant-numeric:tabular-nums}
.card span{color:var(--muted);font-size:13px;display:block}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(350px,100%),1fr));gap:16px}
.figures+.figures{margin-top:16px}.figures .main{grid-column:span 2}.narrow{display:none}
figure{margin:0;background:var(--panel);border:1px solid var(--line);border-radius:10px;padding:12px 10px 6px}
figure svg{display:block;width:100%;height:auto;max-width:420px;margin:0 auto}.wide svg{max-width:884px}
.stated{color:var(--muted);font-size:13.5px;margin:12px 0 0;padding-left:20px}
figcaption{color:var(--muted);font-size:13px;padding:6px 2px}.videos{margin-top:18px}
table+.figures,.scroll+.figures,table+details,.figures+details,.figures+.legend{margin-top:16px}
.figures+.scroll{margin-top:18px;max-width:780px}.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th{color:var(--muted);font-weight:550;font-size:13px;border-bottom:1px solid var(--muted);white-space:nowrap}
th,td{padding:6px 12px;text-align:right;vertical-align:top}
td{border-bottom:1px solid var(--line);font-variant-numeric:tabular-nums}
th.t,td.t{text-align:left}td:not(.t){white-space:nowrap}td.t:last-child{overflow-wrap:anywhere;min-width:16ch}th:first-child,td:first-child{padding-left:4px}
.facts td:first-child{white-space:nowrap;color:var(--muted);width:1%;padding-right:22px}
code,pre,.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:13px}
pre{background:var(--soft);border:1px solid var(--line);border-radius:10px;padding:14px 18px;overflow-x:auto;
margin:10px 0}
summary{cursor:pointer}.missing{color:var(--muted);background:var(--soft);border:1px dashed var(--line);
border-radius:10px;padding:14px 18px;margin:0}
.grid td{text-align:left;border:1px solid var(--line);padding:6px;min-width:84px}.grid th{border:0;text-align:center}
.grid th:first-child{text-align:left}.grid{width:auto;min-width:40%}
.grid td.name{border:0;white-space:nowrap;padding-right:16px}
.grid td.free{background:var(--soft)}
.chip{display:inline-block;color:var(--bg);border-radius:6px;padding:1px 8px;margin:2px;font-size:12.5px;
font-weight:600;white-space:nowrap}
.legend{color:var(--muted);font-size:13.5px;margin:0 0 12px}.legend .chip{margin-right:6px}
.legend>span{margin-right:18px;white-space:nowrap}
@media (max-width:771px){.figures{grid-template-columns:1fr}.figures .main{grid-column:auto}.wide{display:none}
.narrow{display:block}}
@media (max-width:640px){main{padding:22px 12px 48px}figure{padding:8px 2px 2px}.card{padding:10px 12px}
.card b{font-size:21px}.cards{grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:10px}header h1{font-size:25px}
th,td{padding:6px 8px}}
@media print{main{max-width:none;padding:0}h2{break-after:avoid}figure{break-inside:avoid}}
"""


def page(
    title: str, subtitle: str, body: Sequence[str], css: str = "", script: str = "", script_policy: str = ""
) -> str:
    """Renders the complete document.

    Args:
        title, subtitle: Header of the page.
        body: Sections, as HTML.
        css: Added to the style.
        script: Script that runs when the page is loaded.
        script_policy: Content security policy of a page with a script.
    """
    html = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        + (f'<meta http-equiv="Content-Security-Policy" content="{script_policy}">' if script else "")
        + f"<title>{escape(title)} · rlhpc report</title><style>{STYLE}{_CSS}{css}</style></head>\n<body><main>"
        f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>\n"
        + "\n".join(body)
        + (f"\n</main><script>{script}</script></body></html>\n" if script else "\n</main></body></html>\n")
    )
    # Text from logs and models may contain characters that a page must not have: control characters become their pictures,
    # and lone surrogates become question marks.
    return re.sub(r"\r\n?", "\n", html).translate(_CONTROL_PICTURES).encode("utf-8", "replace").decode()


def write_page(html: str, output: Path) -> Path:
    """Writes a page atomically.

    Raises:
        RlhpcError: The page cannot be written.
    """
    try:
        replace_durably(output, html.encode())
    except OSError as error:
        raise unwritten_page_error(error, output) from error
    return output


def section(title: str, content: str) -> str:
    """Renders a section of the page with its title; `content` is HTML."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def card(title: str, figure_value: str, figure_note: str) -> str:
    """Renders one key figure."""
    title_html, note_html = f"<span>{escape(title)}</span>", f"<span>{escape(figure_note)}</span>"
    return f'<div class="card">{title_html}<b>{escape(figure_value)}</b>{note_html}</div>'


def render_figures(charts: Sequence[str], draw_main: Callable[[Size], str] | None = None) -> str:
    """Renders charts in a grid; empty charts are omitted, and numbers that never change become sentences.

    Args:
        charts: The charts.
        draw_main: Function that draws the first chart in a given size: two columns wide on a wide page, one column on a narrow
            page. The font size equals that of the other charts.
    """
    grid_charts, main_html = list(charts), ""
    if draw_main is not None:
        grid_charts = [main_chart := draw_main(CHART), *charts]
        if _has_curve(main_chart):
            wide_html, narrow_html = (
                f'<div class="wide">{draw_main(WIDE)}</div>',
                f'<div class="narrow">{main_chart}</div>',
            )
            main_html = f'<figure class="main">{wide_html}{narrow_html}</figure>'
            grid_charts = list(charts)
    curves = main_html + "".join(f"<figure>{chart_svg}</figure>" for chart_svg in grid_charts if _has_curve(chart_svg))
    sentences_html = "".join(
        f"<li>{sentence}</li>" for chart_svg in grid_charts if (sentence := statement(chart_svg)) is not None
    )
    html = f'<div class="figures">{curves}</div>' if curves else ""
    return html + (f'<ul class="stated">{sentences_html}</ul>' if sentences_html else "")


def _has_curve(chart_svg: str) -> bool:
    return bool(chart_svg) and not is_empty(chart_svg) and statement(chart_svg) is None


def render_placeholder(html: str) -> str:
    """Renders a placeholder for a section that does not exist yet."""
    return f'<p class="missing">{html}</p>'


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]], text_columns: Collection[int] = ()) -> str:
    """Renders a table; numbers are right-aligned, the `text_columns` left-aligned."""

    def format_cells(tag: str, row: Sequence[Cell]) -> str:
        return "".join(
            f'<{tag} class="t">{escape(str(cell))}</{tag}>'
            if i in text_columns
            else f"<{tag}>{escape(str(cell))}</{tag}>"
            for i, cell in enumerate(row)
        )

    return (
        f"<table><thead><tr>{format_cells('th', head)}</tr></thead><tbody>"
        + "".join(f"<tr>{format_cells('td', row)}</tr>" for row in rows)
        + "</tbody></table>"
    )


def facts(pairs: Mapping[str, Any]) -> str:
    """Renders names and values, one per line; values that are None or empty are omitted."""
    rows = "".join(
        f'<tr><td class="t">{escape(name)}</td><td class="t mono">{escape(str(fact_value))}</td></tr>'
        for name, fact_value in pairs.items()
        if fact_value not in (None, "")
    )
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def decimals(shown_value: float) -> str:
    """Formats a number with one decimal, such as a return; with three if it is below 10, such as a reward or a loss."""
    return f"{shown_value:.1f}" if abs(shown_value) >= 10 else f"{shown_value:.3f}"


def time_unit(duration_s: float) -> tuple[str, float]:
    """Returns a unit suited to a duration, and its length in seconds."""
    if duration_s >= 3 * 3600:
        return "h", 3600.0
    return ("min", 60.0) if duration_s >= 300 else ("s", 1.0)
