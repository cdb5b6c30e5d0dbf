"""The report of a quantized model: figures, and a drawing that says what they say."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from llmserve import demo_model_path
from llmserve.quantization import quantize
from llmserve.quantization.report import Report, error_chart, to_html
from llmserve.quantization.result import QuantizeResult


def test_a_report_lies_in_the_folder_and_needs_no_other_file(tmp_path: Path) -> None:
    out = tmp_path / "a<b"
    result = quantize(demo_model_path(), out, scheme="int8", method="rtn", use_tqdm=False)
    report = json.loads((out / "quantize-report.json").read_text())
    assert report["result"]["errors"] == result.errors
    assert report["text"] == "held_out.txt"
    page = (out / "quantize-report.html").read_text()
    assert "a&lt;b: int8 by rtn" in page
    assert "<svg" in page
    assert not re.search(r"(src|href)=", page)
    assert all(name in page for name in result.errors)
    if report["rows"]:
        before, after = report["rows"]
        assert before["change"] is None
        assert abs(after["change"]) < 0.002
        assert after["same_top"] > 0.98
        assert after["weight_bytes"] < before["weight_bytes"]
    else:
        assert report["reason"].startswith("not measured: ")


def test_without_a_text_nothing_is_measured_and_the_report_says_so(tmp_path: Path) -> None:
    from shutil import copytree

    copytree(demo_model_path(), tmp_path / "model")
    quantize(tmp_path / "model", tmp_path / "out", scheme="int8", method="rtn", use_tqdm=False)
    report = json.loads((tmp_path / "out" / "quantize-report.json").read_text())
    assert report["rows"] == []
    assert "--eval-text" in report["reason"]


def test_experts_have_a_row_a_layer_with_their_mean_and_the_worst() -> None:
    errors = {f"model.layers.1.mlp.experts.{i}.down_proj": 0.1 * (i + 1) for i in range(3)}
    errors |= {f"model.layers.1.moe.input_linear.weight[{i}]": 0.01 * (i + 1) for i in range(2)}
    errors["model.layers.1.mlp.gate_proj"] = 0.5
    result = QuantizeResult(
        out=Path("out"), scheme="int4", method="gptq", bytes_before=8, bytes_after=2,
        bits_per_weight=4.1, seconds=1.0, planned_bytes=1, peak_bytes=1, num_tokens=9,
        errors=errors, schemes=dict.fromkeys(errors, "int4"), notes=["few <tokens>"],
    )  # fmt: skip
    page = to_html(Report(result, (), "why", ""))
    cells = [re.findall(r"<td[^>]*>([^<]*)", row) for row in page.split("<tr>")]
    rows = [(row[0], row[2], row[3]) for row in cells if len(row) == 4]
    assert rows == [
        ("model.layers.1.mlp.gate_proj", "5.000e-01", ""),
        ("model.layers.1.mlp.experts.*.down_proj", "2.000e-01", "3.000e-01 (2)"),
        ("model.layers.1.moe.input_linear.weight[*]", "1.500e-02", "2.000e-02 (1)"),
    ]
    assert page.count("<circle") == 3
    assert "few &lt;tokens&gt;" in page


def test_the_chart_has_a_line_a_kind_and_a_point_a_layer_on_a_logarithmic_scale() -> None:
    errors = {f"model.layers.{i}.mlp.{kind}": 10.0 ** -(i + 1) for i in range(3) for kind in "ab"}
    chart = error_chart(errors)
    assert chart.count("<polyline") == 2
    assert chart.count("<circle") == 6
    ys = [float(y) for y in re.findall(r'cy="([\d.]+)"', chart)][:3]
    assert math.isclose(ys[2] - ys[1], ys[1] - ys[0], abs_tol=0.2)
    assert error_chart({}) == "<p>No layer has an error.</p>"
    assert error_chart({"lm_head": 0.5}).count("<circle") == 1
