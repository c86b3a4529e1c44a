"""Sample pages of a run: report/samples.html with the responses of all checkpoints side by side, and report/episodes.html.
Each page is a self-contained file.

Text of a model is untrusted: it is escaped, its control characters are made visible, and its direction marks have no effect
on the text that follows.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import PAGE, RunPaths
from rlhpc.language.reporting.eval_metrics import level_order
from rlhpc.metrics.page import Cell, page, render_placeholder, section, table, write_page
from rlhpc.metrics.provenance import largest_pass_at, metric_title, typed_result, with_pass_at
from rlhpc.metrics.statistics import share_interval, wilson_interval
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import is_count, is_number, open_file, read_file, read_json
from rlhpc.runtime.text import interval_text

_PROBLEMS = 24
"""Maximum number of problems of a suite that are shown in full."""
_CHECKPOINTS = 6
"""Maximum number of checkpoints side by side."""
_MAP_COLUMNS = 240
_FOLD_CHARACTERS, _MAX_SAMPLE_CHARACTERS, _MAX_MORE_SAMPLES = 600, 8000, 7

_CSS = """
.note{color:var(--muted);margin:0 0 14px}.map{overflow-x:auto}.map svg{display:block;min-width:520px}
.map text{font:11.5px system-ui,sans-serif;fill:var(--muted)}
.problem{border:1px solid var(--line);border-radius:10px;margin:16px 0;overflow:hidden}
.problem>header{background:var(--soft);padding:10px 16px;border-bottom:1px solid var(--line)}
.problem>header b{margin-right:14px}.problem>header span{color:var(--muted);font-size:13px;margin-right:14px}
.answers{display:grid;grid-auto-flow:column;grid-auto-columns:minmax(235px,1fr);overflow-x:auto}
.answer{padding:10px 14px;border-left:1px solid var(--line);min-width:0}.answer:first-child{border-left:0}
.answer h4{margin:0 0 2px;font-size:13px}.answer p{margin:0 0 6px;color:var(--muted);font-size:12.5px}
.said{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;background:none;border:0;border-radius:0;
padding:0;margin:6px 0 0;overflow:visible}
.ok,.no{font-weight:650}.ok{color:var(--c2)}.no{color:var(--c3)}
.filter{display:flex;flex-wrap:wrap;gap:10px 16px;align-items:end;margin:0 0 6px;border:0;padding:0}
.filter[hidden],.problem[hidden]{display:none}
.filter label{display:grid;gap:3px;color:var(--muted);min-width:0}
.filter,.filter *{font-size:13px}.filter output{padding:6px 0}
.filter input,.filter select,.filter button{font:inherit;color:inherit;background:var(--soft);
border:1px solid var(--line);border-radius:6px;padding:5px 8px;
height:32px;box-sizing:border-box;min-width:0;max-width:100%}
.filter input[type=number]{width:7em}.filter input[type=search]{width:15em}
.answer details p{margin-top:12px}.answer summary{color:var(--muted);font-size:12.5px;margin-top:6px}
"""

#: Script that shows the problems with a sample that matches the form's fields; the form is visible only if scripts run.
FILTER = """
for (const form of document.querySelectorAll("form.filter")) {
  const problems = [...form.parentElement.querySelectorAll("article.problem")];
  const apply = () => {
    const {answers, least, most, text} = form.elements;
    const word = text.value.trim().toLowerCase();
    const limit = (field, open) => field.value === "" ? open : Number(field.value);
    const low = limit(least, -Infinity), high = limit(most, Infinity), unlimited = least.value === "" && most.value === "";
    const rewarded = ({reward}) => unlimited || reward !== undefined && low <= Number(reward) && Number(reward) <= high;
    let count = 0;
    for (const problem of problems) {
      const asked = problem.querySelector("header .said").textContent.toLowerCase().includes(word);
      const fits = [...problem.querySelectorAll(".sample")].some(sample =>
        (!["right", "wrong"].includes(answers.value) || sample.dataset.answer === answers.value)
        && rewarded(sample.dataset) && (asked || sample.textContent.toLowerCase().includes(word)));
      const kept = fits && (answers.value !== "changed" || problem.dataset.changed !== undefined);
      problem.hidden = !kept;
      count += kept;
    }
    form.querySelector("output").textContent = `${count} of ${problems.length} problems`;
  };
  form.addEventListener("input", apply);
  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(apply));
  form.hidden = false;
  apply();
}
"""

_Row = dict[str, Any]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


#: Checks of the required and the optional fields of a row.
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "id": lambda value: isinstance(value, str) or is_count(value),
    "sample": is_count,
    **dict.fromkeys(("prompt", "response"), lambda value: isinstance(value, str)),
    "right": lambda value: isinstance(value, bool),
}
_OPTIONAL: dict[str, Callable[[Any], bool]] = {
    "level": lambda value: isinstance(value, str) or is_number(value),
    "answer": lambda value: all(isinstance(part, str) or is_number(part) for part in _as_list(value)),
    "tokens": is_count,
    "reward": is_number,
    "terms": lambda value: isinstance(value, dict),
    "images": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    "num_images": is_count,
}


@dataclass(frozen=True)
class _Column:
    """Samples of a suite at one checkpoint.

    Attributes:
        step: Step of the checkpoint.
        result: Contents of the evaluation's JSON file.
        path: Path of the samples file.
        share: Share of right samples, by problem.
        level: Level, by problem.
        selected_rows: Rows of the selected problems.
    """

    step: int
    result: Mapping[str, Any]
    path: Path
    share: dict[Any, float] = field(default_factory=dict)
    level: dict[Any, str] = field(default_factory=dict)
    selected_rows: dict[Any, list[_Row]] = field(default_factory=dict)


def samples_path(result: Path) -> Path:
    """Returns the path of the samples that belong to an evaluation's JSON file: `<suite>.samples.jsonl` in its folder."""
    return result.with_name(f"{result.stem}.samples.jsonl")


def previews_path(result: Path) -> Path:
    """Returns the folder with small copies of the prompts' images of an evaluation: `<suite>.images` next to its JSON file."""
    return result.with_name(f"{result.stem}.images")


def read_samples(path: Path) -> Iterator[_Row]:
    """Yields the rows of a samples file; omits invalid lines, and optional fields of a wrong type.

    Raises:
        OSError: The file cannot be read.
    """
    with io.TextIOWrapper(open_file(path), encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = read_json(line)
            except ValueError:
                continue
            if isinstance(row, dict) and all(name in row and is_valid(row[name]) for name, is_valid in _FIELDS.items()):
                yield {
                    name: field_value
                    for name, field_value in row.items()
                    if name not in _OPTIONAL or _OPTIONAL[name](field_value)
                }


def samples_page(paths: RunPaths) -> Path:
    """Returns the path of a run's page of samples."""
    return paths.report.with_name("samples.html")


def write_samples_page(paths: RunPaths) -> Path | None:
    """Writes the page of a run's samples; returns its path, or None if no evaluation has samples.

    Raises:
        RlhpcError: The page cannot be written.
    """
    suites = {suite: _read_columns(suite_results) for suite, suite_results in _results_with_samples(paths).items()}
    suites = {suite: columns for suite, columns in suites.items() if columns}
    if not suites:
        return None
    target = samples_page(paths)
    html = page(
        title=f"{paths.root.name}: what the model wrote",
        subtitle="the same problems, checkpoint beside checkpoint",
        body=[
            _navigation(list(suites)),
            *(
                f'<div id="suite-{i}">{section(f"Suite {suite}", _render_suite(columns))}</div>'
                for i, (suite, columns) in enumerate(suites.items())
            ),
            f"<script>{FILTER}</script>",
        ],
        css=_CSS,
    )
    return write_page(html, target)


def _navigation(suites: Sequence[str]) -> str:
    links = [f'<a href="{PAGE}">The run</a>']
    if len(suites) > 1:
        links += [f'<a href="#suite-{i}">{escape(suite)}</a>' for i, suite in enumerate(suites)]
    return f"<nav>{' · '.join(links)}</nav>"


def _results_with_samples(paths: RunPaths) -> dict[str, list[tuple[int, Path, Mapping[str, Any]]]]:
    """Returns the evaluations with a samples file by suite, as (step, JSON file, content) with ascending steps."""
    results_by_suite: dict[str, list[tuple[int, Path, Mapping[str, Any]]]] = {}
    for path in paths.eval_results():
        try:
            evaluation, _ = typed_result(read_json(read_file(path)))
            step, suite = evaluation["global_step"], evaluation["suite"]
        except (OSError, ValueError, KeyError, AttributeError):
            continue
        if samples_path(path).is_file():
            results_by_suite.setdefault(suite, []).append((step, path, evaluation))
    return {suite: sorted(results_by_suite[suite], key=lambda entry: entry[:2]) for suite in sorted(results_by_suite)}


def spread(count: int, limit: int) -> list[int]:
    """Returns at most `limit` evenly spaced numbers of `range(count)`, including the first and the last."""
    if count <= limit:
        return list(range(count))
    if limit == 1:
        return [count - 1]
    return [round(i * (count - 1) / (limit - 1)) for i in range(limit)]


def _read_columns(results: Sequence[tuple[int, Path, Mapping[str, Any]]]) -> list[_Column]:
    """Reads the samples of a suite's evaluations, each file twice: scores first, then rows of the selected problems."""
    columns = []
    for step, path, evaluation in results:
        column = _Column(step, evaluation, samples_path(path))
        flags_by_problem: dict[Any, list[bool]] = {}
        for row in _try_read_samples(column.path):
            flags_by_problem.setdefault(row["id"], []).append(row["right"])
            column.level[row["id"]] = str(row.get("level", ""))
        column.share.update({key: sum(right_flags) / len(right_flags) for key, right_flags in flags_by_problem.items()})
        if flags_by_problem:
            columns.append(column)
    if not columns:
        return []
    ids = _order_problems(columns)
    chosen_ids = {ids[i] for i in spread(len(ids), _PROBLEMS)}
    for i in spread(len(columns), _CHECKPOINTS):
        for row in _try_read_samples(columns[i].path):
            if row["id"] in chosen_ids:
                columns[i].selected_rows.setdefault(row["id"], []).append(row)
    return columns


def _try_read_samples(path: Path) -> Iterator[_Row]:
    try:
        yield from read_samples(path)
    except OSError:
        return


def _count_lines(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError:
        return 0


def _order_problems(columns: Sequence[_Column]) -> list[Any]:
    """Returns the ids of the last checkpoint's problems, ordered by level and id, so that evenly spaced problems cover all
    levels.
    """
    last_column = columns[-1]
    return sorted(last_column.share, key=lambda key: (level_order(last_column.level[key]), isinstance(key, str), key))


def _render_suite(columns: Sequence[_Column]) -> str:
    """Renders the section of a suite: table of checkpoints, map, and selected problems."""
    ids = _order_problems(columns)
    chosen_ids = [ids[i] for i in spread(len(ids), _PROBLEMS)]
    columns_with_rows = [column for column in columns if column.selected_rows]
    html_parts = [_render_changes(columns)]
    if len(ids) > 1:
        html_parts += ["<h3>Every problem</h3>", _render_map(columns, ids)]
    omission_note = (
        ""
        if len(chosen_ids) == len(ids)
        else f"{len(chosen_ids)} of {len(ids)} problems, evenly spaced over the levels"
    )
    if len(columns_with_rows) < len(columns):
        omission_note += f"{'; ' if omission_note else ''}{len(columns_with_rows)} of {len(columns)} checkpoints"
    html_parts.append(f'<h3>Problems</h3><p class="note">{escape(omission_note or "All of them")}.</p>')
    for column in columns:
        if num_invalid_lines := _count_lines(column.path) - sum(1 for _ in _try_read_samples(column.path)):
            note = f"{column.path.parent.name}/{column.path.name}: {num_invalid_lines} lines are no samples, and are left out"
            html_parts.append(f'<p class="note">{escape(note)}.</p>')
    html_parts += [_filter_form(), *(_render_problem(key, columns_with_rows) for key in chosen_ids)]
    return "".join(html_parts)


def _filter_form() -> str:
    """Renders the form that filters the problems of a suite; the form is hidden if no scripts run."""
    choices = {
        "any": "any",
        "right": "one is right",
        "wrong": "one is wrong",
        "changed": "differ between checkpoints",
    }
    options_html = "".join(
        f'<option value="{option_value}">{option_label}</option>' for option_value, option_label in choices.items()
    )
    rewards_html = "".join(
        f'<label>{option_label}<input type="number" name="{name}" step="any"/></label>'
        for name, option_label in (("least", "reward from"), ("most", "to"))
    )
    return (
        f'<form class="filter" hidden><label>answers<select name="answers">{options_html}</select></label>{rewards_html}'
        '<label>text in prompt or answer<input type="search" name="text"/></label>'
        '<button type="reset">show all</button><output aria-live="polite"></output></form>'
    )


def _render_changes(columns: Sequence[_Column]) -> str:
    """Renders a table of checkpoints: accuracy, pass@k for several samples, and the numbers of problems with a higher and a
    lower share of right samples than at the previous checkpoint.
    """
    rows: list[list[Cell]] = []
    evaluations = [with_pass_at(column.result) for column in columns]
    pass_metric = largest_pass_at(name for evaluation in evaluations for name in evaluation)
    previous_column: _Column | None = None
    for column, evaluation in zip(columns, evaluations, strict=True):
        common_problems = [key for key in column.share if previous_column is not None and key in previous_column.share]
        num_better = (
            sum(column.share[key] > previous_column.share[key] for key in common_problems) if previous_column else "–"
        )
        num_worse = (
            sum(column.share[key] < previous_column.share[key] for key in common_problems) if previous_column else "–"
        )
        accuracy = sum(column.share.values()) / len(column.share)
        interval_cell = interval_text(column.result.get("accuracy_ci95"), ".1%") or "–"
        pass_share = evaluation.get(pass_metric or "")
        pass_cells = [f"{pass_share:.1%}" if isinstance(pass_share, int | float) else "–"] if pass_metric else []
        rows.append(
            [column.step, len(column.share), f"{accuracy:.1%}", interval_cell, *pass_cells, num_better, num_worse]
        )
        previous_column = column
    pass_cells = [metric_title(pass_metric)] if pass_metric else []
    header = ["step", "problems", "accuracy", "95 % interval", *pass_cells, "better than before", "worse than before"]
    return f'<div class="scroll">{table(header, rows)}</div>'


def _render_map(columns: Sequence[_Column], ids: Sequence[Any]) -> str:
    """Renders a map of all problems: rows are checkpoints, columns problems, and opacity is the share of right samples."""
    map_problems = [ids[i] for i in spread(len(ids), _MAP_COLUMNS)]
    margin, height = 78, 17
    width = max(4, min(22, 1080 // len(map_problems)))
    rectangles, level = [], None
    for j, key in enumerate(map_problems):
        if (name := columns[-1].level[key]) != level:
            level = name
            rectangles.append(f'<text x="{margin + j * width}" y="12">{escape(name[:18])}</text>')
    for i, column in enumerate(columns):
        y = 20 + i * (height + 2)
        rectangles.append(f'<text x="{margin - 8}" y="{y + 12}" text-anchor="end">step {column.step}</text>')
        for j, key in enumerate(map_problems):
            right_share = column.share.get(key)
            fill = "var(--soft)" if not right_share else "var(--c2)"
            opacity = 1.0 if not right_share else 0.2 + 0.8 * right_share
            cell_title = "not asked" if right_share is None else f"{right_share:.0%} right"
            rectangles.append(
                f'<rect x="{margin + j * width}" y="{y}" width="{width - 1}" height="{height}" '
                f'style="fill:{fill};opacity:{opacity:.2f};stroke:var(--line);stroke-width:.6">'
                f"<title>problem {escape(str(key))}, step {column.step}: {cell_title}</title></rect>"
            )
    size = margin + width * len(map_problems) + 4, 24 + len(columns) * (height + 2)
    note = f"{len(map_problems)} of {len(ids)} problems. " if len(map_problems) < len(ids) else ""
    return (
        f'<p class="note">{note}Each row is a checkpoint, each column a problem. Filled: right; paler: some of its samples '
        "are right.</p>"
        f'<div class="map"><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
        f'width="{size[0]}" height="{size[1]}" role="img" aria-label="right and wrong by problem">'
        f"{''.join(rectangles)}</svg></div>"
    )


def _render_problem(key: Any, columns: Sequence[_Column]) -> str:
    """Renders a problem with the answers of all checkpoints."""
    first_sample = next((rows[0] for column in reversed(columns) if (rows := column.selected_rows.get(key))), None)
    if first_sample is None:
        return ""
    fact_items = [f"<b>Problem {escape(str(key))}</b>"]
    if first_sample.get("level"):
        fact_items.append(f"<span>level {escape(str(first_sample['level']))}</span>")
    if first_sample.get("answer"):
        fact_items.append(f"<span>answer <code>{escape(str(first_sample['answer'])[:200])}</code></span>")
    cells = []
    for column in columns:
        rows = sorted(column.selected_rows.get(key, []), key=lambda row: row["sample"])
        # If the suite was changed between two evaluations, the same id may belong to another prompt.
        same_prompt = bool(rows) and rows[0]["prompt"] == first_sample["prompt"]
        cells.append(
            _render_answer(column.step, rows)
            if same_prompt
            else f'<div class="answer"><h4>step {column.step}</h4>{render_placeholder("Not asked at this checkpoint.")}</div>'
        )
    right_shares = {column.share[key] for column in columns if key in column.share}
    changed_html = " data-changed" if len(right_shares) > 1 else ""
    prompt_html = _render_text(first_sample["prompt"])
    return (
        f'<article class="problem"{changed_html}><header>{"".join(fact_items)}{prompt_html}</header>'
        f'<div class="answers">{"".join(cells)}</div></article>'
    )


def _render_answer(step: int, rows: Sequence[_Row]) -> str:
    num_right = sum(row["right"] for row in rows)
    count_text = f" · {num_right} of {len(rows)} right" if len(rows) > 1 else ""
    html = f"<h4>step {step}{count_text}</h4>{_render_sample(rows[0])}"
    if further_rows := rows[1 : 1 + _MAX_MORE_SAMPLES]:
        samples_html = "".join(_render_sample(row) for row in further_rows)
        html += (
            f"<details><summary>{len(further_rows)} more of its {len(rows)} samples</summary>{samples_html}</details>"
        )
    return f'<div class="answer">{html}</div>'


def _render_sample(row: _Row) -> str:
    """Renders a sample with its score."""
    verdict_html = '<span class="ok">✓ right</span>' if row["right"] else '<span class="no">✗ wrong</span>'
    facts = [f"{row['tokens']} tokens"] if "tokens" in row else []
    if row.get("finished") is False:
        facts.append("cut off")
    if row.get("failed"):
        facts.append("could not be judged")
    reward_terms = row.get("terms")
    if reward_terms is not None and "reward" in row:
        terms_text = ", ".join(
            f"{name} {term_value:.3g}" for name, term_value in reward_terms.items() if is_number(term_value)
        )
        facts.append(f"reward {row['reward']:.3g}" + (f" ({terms_text})" if len(reward_terms) > 1 else ""))
    reward = f' data-reward="{row["reward"]:.9g}"' if "reward" in row else ""
    attributes = f'data-answer="{"right" if row["right"] else "wrong"}"{reward}'
    header = f"<p>{verdict_html} · {escape(' · '.join(facts))}</p>"
    return f'<div class="sample" {attributes}>{header}{_render_text(row["response"])}</div>'


def _render_text(text: str) -> str:
    """Renders untrusted text; folds long texts, and truncates very long texts."""
    visible_text = text if len(text) <= _FOLD_CHARACTERS * 1.2 else text[:_FOLD_CHARACTERS]
    html = f'<pre class="said" dir="auto">{escape(visible_text) or "<i>nothing</i>"}</pre>'
    if remaining_text := text[len(visible_text) : _MAX_SAMPLE_CHARACTERS]:
        cut_note = (
            f"\n[{len(text) - _MAX_SAMPLE_CHARACTERS} more characters are in the samples file]"
            if len(text) > _MAX_SAMPLE_CHARACTERS
            else ""
        )
        html += (
            f"<details><summary>{len(text) - len(visible_text)} more characters</summary>"
            f'<pre class="said" dir="auto">{escape(remaining_text)}{cut_note}</pre></details>'
        )
    return html


def compare(first_run: str | Path, second_run: str | Path) -> dict[str, Any]:
    """Compares two evaluations of one suite, sample by sample: two engines with one model, or two models.

    Args:
        first_run, second_run: JSON files of the evaluations, with the samples in the same folders.

    Returns:
        n (common samples), same_text and same_right (shares), accuracy (of both evaluations), difference (second − first,
        mean over problems), difference_ci95 (paired 95 % interval), and examples (the first five samples with different
        texts).

    Raises:
        ConfigError: A file cannot be read, or the evaluations have no problem in common.
    """
    differing_texts, first_rows, second_rows = [], _rows_by_sample(first_run), _rows_by_sample(second_run)
    common_keys = [
        key for key in first_rows if key in second_rows and first_rows[key]["prompt"] == second_rows[key]["prompt"]
    ]
    if not common_keys:
        raise ConfigError(f"{first_run} and {second_run} have no problem in common; compare evaluations of one suite")
    problems: dict[Any, list[int]] = {}
    for key in common_keys:
        first_row, second_row = first_rows[key], second_rows[key]
        problems.setdefault(key[0], []).append(int(second_row["right"]) - int(first_row["right"]))
        if first_row["response"] != second_row["response"]:
            differing_texts.append(
                {"id": key[0], "sample": key[1], "first": first_row["response"], "second": second_row["response"]}
            )
    differences = [sum(problem_differences) / len(problem_differences) for problem_differences in problems.values()]
    # Differences are from -1 to 1. If no problem differs, the interval is the upper bound of the share that may differ.
    bound = wilson_interval(0, len(differences))[1]
    interval_shares = share_interval([(difference + 1) / 2 for difference in differences])
    interval_ends = [2 * end - 1 for end in interval_shares] if any(differences) else [-bound, bound]
    return {
        "n": len(common_keys),
        "same_text": 1 - len(differing_texts) / len(common_keys),
        "same_right": sum(first_rows[key]["right"] == second_rows[key]["right"] for key in common_keys)
        / len(common_keys),
        "accuracy": [
            sum(rows[key]["right"] for key in common_keys) / len(common_keys) for rows in (first_rows, second_rows)
        ],
        "difference": sum(differences) / len(differences),
        "difference_ci95": list(interval_ends),
        "examples": differing_texts[:5],
    }


def _rows_by_sample(result: str | Path) -> dict[tuple[Any, int], dict[str, Any]]:
    path = samples_path(Path(result))
    try:
        return {(row["id"], row["sample"]): row for row in read_samples(path)}
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; an evaluation writes it beside its JSON"
        ) from error


_EPISODES = 24
"""Maximum number of episodes of a suite on the page."""
_MAX_CHARACTERS = 4000
_EPISODE_CSS = """
.note{color:var(--muted);margin:0 0 14px}
.episode{border:1px solid var(--line);border-radius:10px;margin:16px 0;overflow:hidden}
.episode>header{background:var(--soft);padding:10px 16px;border-bottom:1px solid var(--line)}
.episode>header b{margin-right:14px}.episode>header span{color:var(--muted);font-size:13px;margin-right:14px}
.branches{display:grid;grid-auto-flow:column;grid-auto-columns:minmax(320px,1fr);overflow-x:auto}
.branch{padding:10px 14px;border-left:1px solid var(--line);min-width:0}.branch:first-child{border-left:0}
.branch h4{margin:0 0 6px;font-size:13px}
.part{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;font-size:13px;margin:6px 0;padding:6px 10px;
border-radius:8px;font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.read{background:var(--soft);color:var(--muted)}.drawn{border:1px solid var(--line)}
.drawn b,.read b{display:block;font:600 11.5px system-ui,sans-serif;color:var(--muted)}
.drawn i{font-style:normal;border-radius:3px}
.ok,.no{font-weight:650}.ok{color:var(--c2)}.no{color:var(--c3)}
"""


def episodes_page(paths: RunPaths) -> Path:
    """Returns the path of a run's page of episodes."""
    return paths.report.with_name("episodes.html")


def write_episodes_page(paths: RunPaths) -> Path | None:
    """Writes the page of a run's episodes from each suite's last evaluation; returns its path, or None if the evaluations have
    no transcripts of episodes.

    Raises:
        RlhpcError: The page cannot be written.
    """
    sections = []
    for suite, suite_results in _results_with_samples(paths).items():
        step, path, _ = suite_results[-1]
        rows = [row for row in _try_read_samples(samples_path(path)) if _is_episode(row.get("episode"))]
        if rows:
            selected_rows = [rows[row_index] for row_index in spread(len(rows), _EPISODES)]
            selection_note = (
                f'<p class="note">{len(selected_rows)} of {len(rows)} episodes, evenly spaced, at step {step}.</p>'
            )
            sections.append(section(f"Suite {suite}", selection_note + "".join(map(_render_episode, selected_rows))))
    if not sections:
        return None
    target = episodes_page(paths)
    navigation = f'<nav><a href="{PAGE}">The run</a></nav>'
    html = page(
        title=f"{paths.root.name}: episodes",
        subtitle="what was read, what was drawn, what it was worth",
        body=[navigation, *sections],
        css=_EPISODE_CSS,
    )
    return write_page(html, target)


def _is_episode(samples: Any) -> bool:
    """Returns whether a value has the format of `transcript`; other programs may have written the file."""
    return (
        isinstance(samples, list)
        and bool(samples)
        and all(
            isinstance(sample, dict) and isinstance(sample.get("parts"), list) and all(map(_is_part, sample["parts"]))
            for sample in samples
        )
    )


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict) or not is_count(part.get("turn")) or not is_number(part.get("reward") or 0):
        return False
    if "drawn" not in part:
        return isinstance(part.get("read"), str)
    return isinstance(part["drawn"], list) and all(map(_is_token, part["drawn"]))


def _is_token(token: Any) -> bool:
    return isinstance(token, list) and len(token) == 2 and isinstance(token[0], str) and is_number(token[1])


def _render_episode(row: _Row) -> str:
    verdict_html = '<span class="ok">✓ right</span>' if row["right"] else '<span class="no">✗ wrong</span>'
    samples: Sequence[Any] = row["episode"]
    turns = {(str(s.get("role")), part["turn"]) for s in samples for part in s["parts"] if "drawn" in part}
    fact_texts = [f"{len(turns)} turns", f"{len(samples)} branches" if len(samples) > 1 else "one branch"]
    if "reward" in row:
        fact_texts.append(f"reward {row['reward']:.3g}")
    if row.get("answer"):
        fact_texts.append(f"answer {str(row['answer'])[:200]}")
    facts_html = "".join(f"<span>{escape(fact_text)}</span>" for fact_text in fact_texts)
    branches_html = "".join(
        _render_branch(branch_number, sample, len(samples)) for branch_number, sample in enumerate(samples, 1)
    )
    header = f"<header><b>Problem {escape(str(row['id']))}</b>{verdict_html} {facts_html}</header>"
    return f'<article class="episode">{header}<div class="branches">{branches_html}</div></article>'


def _render_branch(number: int, sample: Any, num_branches: int) -> str:
    role = escape(str(sample.get("role") or ""))
    title = " · ".join(filter(None, [role, f"branch {number} of {num_branches}" if num_branches > 1 else ""]))
    return f'<div class="branch"><h4>{title}</h4>{"".join(map(_render_part, sample["parts"]))}</div>'


def _render_part(part: Any) -> str:
    if "drawn" not in part:
        part_text = part["read"] if len(part["read"]) <= _MAX_CHARACTERS else part["read"][:_MAX_CHARACTERS] + "…"
        return f'<div class="part read" dir="auto"><b>read</b>{escape(part_text)}</div>'
    reward = f", reward {part['reward']:.3g}" if part.get("reward") else ""
    tokens_html = "".join(_render_token(token_text, logprob) for token_text, logprob in part["drawn"][:_MAX_CHARACTERS])
    return f'<div class="part drawn" dir="auto"><b>turn {part["turn"] + 1}{reward}</b>{tokens_html}</div>'


def _render_token(text: str, logprob: float) -> str:
    """Renders a token with its log-prob; a less likely token has a more opaque background."""
    surprise_percent = round(100 * (1 - math.exp(min(0.0, logprob))))
    style = (
        f' style="background:color-mix(in srgb,var(--c3) {surprise_percent}%,transparent)"'
        if surprise_percent > 2
        else ""
    )
    return f'<i title="log-prob {logprob:.3f}"{style}>{escape(text)}</i>'
