"""What a quantized model lost, takes and gains: as JSON, and as one HTML file by itself."""

import dataclasses
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve._version import __version__
from llmserve.bench.comparison import Candidate, ComparisonRow, compare_models
from llmserve.common.html_table import html_table
from llmserve.common.units import human_bytes
from llmserve.errors import LLMServeError
from llmserve.quantization.result import QuantizeResult

JSON_NAME = "quantize-report.json"
HTML_NAME = "quantize-report.html"
# An expert's number: of a module, or of a matrix of a tensor.
_EXPERT = re.compile(r"(?<=\.experts\.)(\d+)(?=\.)|(?<=\.weight\[)(\d+)(?=\])")
_MAX_TOKENS = 20000  # of the text that is measured with: standard errors of some hundredths of %
_COLOURS = ("#3b6fb5", "#c2582b", "#3f8f5b", "#8a5aa8", "#8c8c8c", "#b59a2b", "#4aa3a3")


@dataclass(frozen=True, slots=True)
class Report:
    """rows are the model before and after; without any, `reason` says why."""

    result: QuantizeResult
    rows: Sequence[ComparisonRow]
    reason: str
    text: str

    @property
    def folder(self) -> Path:
        """Where both files go: the model's folder, or the one of its file."""
        out = self.result.out
        return out if out.is_dir() else out.parent


def make_report(
    result: QuantizeResult, model: Path, text: Path | None, *, num_threads: int
) -> Report:
    """Measures both models over a text that calibration has not seen; None: nothing is measured."""
    if text is None:
        reason = "no text to measure with was given (--eval-text)"
        return Report(result, (), reason, "")
    try:
        candidates = [
            Candidate("before", str(model), {"quantization": "none", "num_threads": num_threads}),
            Candidate("after", str(result.out), {"num_threads": num_threads}),
        ]
        words = text.read_text(encoding="utf-8")
        rows = compare_models(candidates, words, max_tokens=_MAX_TOKENS)
    except LLMServeError as error:  # others may load what llmserve does not
        return Report(result, (), f"not measured: {error}", text.name)
    return Report(result, rows, "", text.name)


def write_report(report: Report) -> None:
    """Both files, in the model's folder."""
    out = report.folder
    fields = {"llmserve": __version__, **dataclasses.asdict(report)}
    text = json.dumps(fields, indent=2, default=str) + "\n"
    (out / JSON_NAME).write_text(text, encoding="utf-8")
    (out / HTML_NAME).write_text(to_html(report), encoding="utf-8")


def to_html(report: Report) -> str:
    """A page: what was done, what it changed, the error of each layer drawn and listed."""
    result = report.result
    title = f"{result.out.name}: {result.scheme} by {result.method}"
    facts = [
        ("bytes of tensors", f"{human_bytes(result.bytes_before)} → "
         f"{human_bytes(result.bytes_after)}"),
        ("bits a weight of linear layers", f"{result.bits_per_weight:.3f}"),
        ("tokens of calibration", str(result.num_tokens)),
        ("seconds", f"{result.seconds:.0f}"),
        ("memory, said and taken", f"{human_bytes(result.planned_bytes)}, "
         f"{human_bytes(result.peak_bytes)}"),
    ]  # fmt: skip
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        html_table("What was done", ("", ""), facts),
        _comparison(report),
        "<h2>Relative error of each layer's outputs</h2>",
        error_chart(result.errors),
        html_table(
            "Linear layers, the largest error first",
            ("layer", "scheme", "error", "of the worst expert"),
            _error_rows(result),
        ),
    ]
    if result.notes:
        parts.append(html_table("Notes", ("",), [(note,) for note in result.notes]))
    style = (
        "body{font:14px system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;border-bottom:1px "
        "solid #ccc}caption{text-align:left;font-weight:600}"
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{style}</style><body>{''.join(parts)}</body></html>\n"
    )


def _error_rows(result: QuantizeResult) -> list[tuple[str, str, str, str]]:
    """A row a linear layer; the experts of a layer have one, with their mean and the worst."""
    groups: dict[str, list[str]] = {}
    for name in result.errors:
        groups.setdefault(_EXPERT.sub("*", name), []).append(name)
    rows = []
    for name, members in groups.items():
        errors = {member: result.errors[member] for member in members}
        worst = max(errors, key=lambda member: errors[member])
        found = _EXPERT.search(worst)
        told = "" if found is None else f"{errors[worst]:.3e} ({found[1] or found[2]})"
        schemes = {result.schemes.get(member, "") for member in members}
        rows.append((sum(errors.values()) / len(errors), name, ", ".join(sorted(schemes)), told))
    return [(name, scheme, f"{e:.3e}", told) for e, name, scheme, told in sorted(rows)[::-1]]


def _comparison(report: Report) -> str:
    if not report.rows:
        return f"<p>{html.escape(report.reason)}</p>"
    head = ("", "perplexity", "change", "KL", "same top", "weights", "prompt", "decode")
    rows = [
        (
            row.name,
            f"{row.perplexity:.4f}",
            "" if row.change is None else f"{row.change:+.2%} ± {row.change_error:.2%}",
            "" if row.mean_kl is None else f"{row.mean_kl:.5f}",
            "" if row.same_top is None else f"{row.same_top:.2%}",
            human_bytes(row.weight_bytes),
            f"{row.prefill_per_s:.0f} tokens/s",
            f"{row.decode_per_s:.1f} tokens/s",
        )
        for row in report.rows
    ]
    caption = f"Before and after, over {report.rows[0].num_tokens} tokens of {report.text}"
    return html_table(caption, head, rows)


def error_chart(errors: Mapping[str, float]) -> str:
    """Errors over layers on a logarithmic scale, a line a kind of linear layer, as SVG."""
    lines = _lines(errors)
    values = [value for points in lines.values() for _, value in points if value > 0]
    if not values:
        return "<p>No layer has an error.</p>"
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    last = max(x for points in lines.values() for x, _ in points)
    width, height, left, bottom = 820, 320, 60, 30
    legend = 150

    def place(x: float, value: float) -> tuple[float, float]:
        share = (math.log10(max(value, 10.0**low)) - low) / (high - low)
        along = left + x / max(last, 1) * (width - left - legend)
        return along, 10 + (1 - share) * (height - 10 - bottom)

    marks: list[str] = []
    for power in range(low, high + 1):
        _, y = place(0, 10.0**power)
        marks.append(
            f'<line x1="{left}" x2="{width - legend}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>'
        )
    for x in sorted({0, last // 2, last}):
        along, _ = place(x, 1)
        marks.append(f'<text x="{along:.1f}" y="{height - 8}" text-anchor="middle">{x}</text>')
    for i, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        dots = "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>'
            for x, y in (place(*point) for point in points)
        )
        marks.append(f'<polyline fill="none" stroke="{colour}" points="{path}"/>{dots}')
        y = 20 + 18 * i
        marks.append(
            f'<text x="{width - legend + 20}" y="{y}" fill="{colour}">{html.escape(name)}</text>'
        )
    middle = (left + width - legend) / 2
    marks.append(f'<text x="{middle}" y="{height + 10}" text-anchor="middle">decoder layer</text>')
    return (
        f'<svg role="img" viewBox="0 0 {width} {height + 16}" width="{width}" '
        f'font-family="system-ui,sans-serif" font-size="12"><title>Relative error by layer</title>'
        f"{''.join(marks)}</svg>"
    )


def _lines(errors: Mapping[str, float]) -> dict[str, list[tuple[int, float]]]:
    """(layer, error) of each kind of linear layer: "model.layers.3.mlp.up_proj" is of 3. Of experts
    it is their mean."""
    lines: dict[str, dict[int, list[float]]] = {}
    for name, error in errors.items():
        words: list[Any] = name.split(".")
        numbers = [i for i, word in enumerate(words) if word.isdigit()]
        at = numbers[0] if numbers else None
        kind = _EXPERT.sub("*", name if at is None else ".".join(words[at + 1 :]))
        layer = 0 if at is None else int(words[at])
        lines.setdefault(kind, {}).setdefault(layer, []).append(error)
    return {
        kind: [(layer, sum(of) / len(of)) for layer, of in sorted(layers.items())]
        for kind, layers in lines.items()
    }
