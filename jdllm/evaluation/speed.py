"""Timings of generation as a table that can be checked: JSON for programs, Markdown for people, plots.

A row is one way to generate at one size.  Ratios are computed from the rows themselves when they are written, always between
rows of the same preset, steps, batch and latents: how many times faster than the PyTorch twin in eager fp32, than the twin in
bfloat16 in a CUDA graph, and than our own plain XLA program with unquantised weights.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jdllm.kernels.roofline import RTX_5090

TORCH_EAGER, TORCH_GRAPH, XLA = ("torch-eager", "fp32"), ("torch-graph", "bf16"), "xla"
SUMMARY = (
    "preset", "steps", "batch", "latents", "implementation", "weights", "ms_median", "ms_p90", "tok_s", "floor_fraction",
    "ratio_torch_eager_fp32", "ratio_torch_graph", "ratio_xla", "quality",
)  # fmt: skip
"""Keys of a row in summary.json."""
TITLES = {
    "main": "Presets", "batch": "By batch", "latents": "By latents", "steps": "By denoising steps",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured way to generate."""

    table: str
    """main, batch, latents or steps."""
    preset: str
    steps: int
    batch: int
    latents: int
    tokens: int
    """Of one window."""
    implementation: str
    weights: str
    ms_median: float
    ms_p90: float
    repeats: int
    bytes: int
    flops: int
    floor_fraction: float
    """Memory floor at the bandwidth measured in the same run, over the median."""
    peak_fraction: float
    """Arithmetic floor at the measured rate of matrix products, over the median."""
    in_cache: bool
    """The weights of a step fit the card's L2 cache, so the memory floor is not one."""
    quality: str
    cold_start_s: float | None = None
    """First call: tracing, compilation and one run."""
    projected_5090_ms: float | None = None
    equal_to_xla: float | None = None
    """Share of tokens equal to those of plain XLA from the same weights and noise."""
    throttled: tuple[str, ...] = ()

    @property
    def tok_s(self) -> float:
        return 1e3 * self.batch * self.tokens / self.ms_median

    @property
    def size(self) -> tuple[Any, ...]:
        """What two rows must share to be compared."""
        return self.preset, self.steps, self.batch, self.latents, self.tokens


@dataclasses.dataclass(frozen=True)
class NotRun:
    """A row that is not there, and why."""

    preset: str
    steps: int
    batch: int
    latents: int
    implementation: str
    weights: str
    reason: str


def with_ratios(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """All fields of every row, tok_s, and the ratios; None where there is nothing to compare with."""

    def median(row: Row, implementation: str, weights: Sequence[str]) -> float | None:
        """Of the same table where it is there twice."""
        found = [r for r in rows if r.size == row.size and r.implementation == implementation and r.weights in weights]
        return min(found, key=lambda r: r.table != row.table).ms_median if found else None

    full = []
    for row in rows:
        against = {
            "ratio_torch_eager_fp32": median(row, TORCH_EAGER[0], TORCH_EAGER[1:]),
            "ratio_torch_graph": median(row, TORCH_GRAPH[0], TORCH_GRAPH[1:]),
            "ratio_xla": median(row, XLA, ("bf16", "fp32")),
        }
        ratios = {name: None if ms is None else ms / row.ms_median for name, ms in against.items()}
        full.append({**dataclasses.asdict(row), "tok_s": row.tok_s, **ratios})
    return full


def write(folder: Path, about: dict[str, Any], rows: Sequence[Row], missing: Sequence[NotRun]) -> None:
    """summary.json (its keys are fixed), details.json and README.md; called after every row."""
    folder.mkdir(parents=True, exist_ok=True)
    full = with_ratios(rows)
    short = {name: about[name] for name in ("device", "read_bandwidth_tb_s", "commit", "command")}
    short["rows"] = [{name: row[name] for name in SUMMARY} for row in full]
    details = {**about, "rows": full, "not_run": [dataclasses.asdict(row) for row in missing]}
    for name, values in (("summary.json", short), ("details.json", details)):
        temporary = folder / (name + ".tmp")
        temporary.write_text(json.dumps(values, indent=1) + "\n")
        temporary.rename(folder / name)
    (folder / "README.md").write_text(markdown(about, full, missing), encoding="utf-8")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a Markdown table; a dash is what was not measured."""

    def shown(value: float | None, form: Callable[[float], str]) -> str:
        return "–" if value is None else form(value)

    def times(value: float | None) -> str:
        return shown(value, lambda x: f"{x:.2f}x")

    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("preset", lambda r: r["preset"]),
        ("steps", lambda r: str(r["steps"])),
        ("batch", lambda r: str(r["batch"])),
        ("latents", lambda r: str(r["latents"])),
        ("implementation", lambda r: r["implementation"]),
        ("weights", lambda r: r["weights"]),
        ("ms, median", lambda r: f"{r['ms_median']:.3f}" + ("*" if r["throttled"] else "")),
        ("p90", lambda r: f"{r['ms_p90']:.3f}"),
        ("tok/s", lambda r: f"{r['tok_s']:,.0f}"),
        ("GB moved", lambda r: f"{r['bytes'] / 1e9:.3g}"),
        ("of memory floor", lambda r: f"{r['floor_fraction']:.0%}" + (" (cache)" if r["in_cache"] else "")),
        ("of arithmetic peak", lambda r: f"{r['peak_fraction']:.0%}"),
        ("vs torch eager fp32", lambda r: times(r["ratio_torch_eager_fp32"])),
        ("vs torch graph", lambda r: times(r["ratio_torch_graph"])),
        ("vs XLA", lambda r: times(r["ratio_xla"])),
        ("tokens as XLA", lambda r: shown(r["equal_to_xla"], lambda x: f"{x:.1%}")),
        ("cold start, s", lambda r: shown(r["cold_start_s"], lambda x: f"{x:.1f}")),
        ("RTX 5090, projected ms", lambda r: shown(r["projected_5090_ms"], lambda x: f"{x:.2f}")),
        ("quality", lambda r: r["quality"]),
    ]
    cells = {name: [cell(row) for row in rows] for name, cell in columns}
    cells = {name: column for name, column in cells.items() if set(column) != {"–"}}
    lines = [[*cells], ["---"] * len(cells), *zip(*cells.values())]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(about: dict[str, Any], rows: Sequence[dict[str, Any]], missing: Sequence[NotRun]) -> str:
    """README.md of the folder."""
    clocks = about["clocks"]
    parts = [
        f"# Generation on {about['device']}",
        *(
            []
            if about["backend"] == "gpu"
            else [
                f"**These are CPU timings.** They say nothing about a GPU. PyTorch had {about['torch_threads']} threads."
            ]
        ),
        f"`{about['command']}` at commit {about['commit']}, {about['date']}; {', '.join(about['versions'])}.",
        f"Measured in the same run: {about['read_bandwidth_tb_s']:.3g} TB/s read from memory, "
        f"{about['matmul_tflop_s']:.3g} TFLOP/s in {about['matmul']}. A generation is everything from noise to tokens, timed by the "
        "host's clock, launches included. GB moved are counted, not measured (jdllm/kernels/roofline.py): what has to be read and "
        "written at least. “(cache)”: the weights of a step fit the L2 cache, so more than 100% is possible. Ratios say how many "
        "times faster a row is than the PyTorch twin in eager fp32, than the twin in bfloat16, compiled, in a CUDA graph, and than "
        "our own XLA program with unquantised weights.",
        clock_line(clocks),
        f"Cold start is the first call (tracing, compilation, one run), with {about['compiled_side_by_side']} programs compiled side by "
        "side.",
    ]
    if about["backend"] == "gpu":
        parts.append(
            f"{RTX_5090.name}, **a projection, not a measurement**: the larger of bytes / {RTX_5090.bandwidth / 1e12:.2f} TB/s "
            f"and operations / {RTX_5090.peak / 1e12:.1f} TFLOP/s, over the share of the larger of the two floors that was reached here; a dash where the weights "
            f"exceed {RTX_5090.memory / 1e9:.0f} GB. Its {RTX_5090.l2 / 1e6:.0f} MB L2 cache is not in it."
        )
    for name, title in TITLES.items():
        chosen = [row for row in rows if row["table"] == name]
        if chosen:
            parts.append(f"## {title}\n\n{table(chosen)}")
    for name in ("throughput_by_batch", "throughput_by_latents", "roofline"):
        if (about.get("plots") or {}).get(name):
            parts.append(f"![{name.replace('_', ' ')}]({name}.png)")
    if missing:
        parts.append("## Not run\n\n" + "\n".join(missing_lines(missing)))
    return "\n\n".join(parts) + "\n"


def missing_lines(missing: Sequence[NotRun]) -> list[str]:
    """One line for all rows of a preset that share implementation and reason."""
    groups: dict[tuple[str, str, str], list[NotRun]] = {}
    for m in missing:
        groups.setdefault((m.preset, m.implementation, m.reason), []).append(m)
    lines = []
    for (preset, implementation, reason), rows in groups.items():
        values = {
            name: ", ".join(map(str, sorted({getattr(row, name) for row in rows})))
            for name in ("weights", "batch", "latents", "steps")
        }
        sizes = "; ".join(f"{name} {listed}" for name, listed in values.items())
        lines.append(f"* {preset}, {implementation} ({sizes}): {reason}")
    return lines


def clock_line(clocks: dict[str, Any]) -> str:
    """What the card's clocks did, in a sentence."""
    if not clocks.get("samples"):
        return f"Clocks were not read ({clocks.get('complaint') or 'no nvidia-smi here'})."
    sm, watts, celsius = (clocks[name] for name in ("sm_mhz", "watts", "celsius"))
    held = ", ".join(clocks["throttled_by"])
    return (
        f"Clocks in {clocks['samples']} samples: SM {sm[0]:.0f}–{sm[1]:.0f} MHz, {watts[0]:.0f}–{watts[1]:.0f} W, "
        f"{celsius[0]:.0f}–{celsius[1]:.0f} °C; "
        + (f"**held down at times by: {held}** (rows with *)." if held else "never held down.")
    )


def quality(run: Path | None, steps: int) -> str:
    """What `jdllm eval` found for these weights at this number of steps."""
    if run is None:
        return "random weights"
    path = run / "eval.json"
    if not path.is_file():
        return "not evaluated"
    found = json.loads(path.read_text())
    parts = []
    if found.get("reconstruction"):
        parts.append(f"reconstruction {found['reconstruction']['0']:.1%}")
    samples = found["samples"].get(str(steps))
    if samples:
        figures, human = samples["samples"], samples["human"]
        if figures["perplexity"] is not None:
            parts.append(f"perplexity {figures['perplexity']:.0f} (text {human['perplexity']:.0f})")
        parts.append(f"entropy {figures['entropy']:.2f} (text {human['entropy']:.2f})")
    else:
        parts.append(f"samples of {steps} steps not evaluated")
    return ", ".join(parts)


def plot(folder: Path, about: dict[str, Any], rows: Sequence[Row]) -> dict[str, bool]:
    """Throughput by batch and by latents, and the roofline; says which were drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import matplotlib.ticker

    def lines(rows: Sequence[Row], x: Callable[[Row], float], y: Callable[[Row], float], axes: Any) -> None:
        for way in dict.fromkeys((row.implementation, row.weights) for row in rows):
            points = sorted((x(row), y(row)) for row in rows if (row.implementation, row.weights) == way)
            axes.plot(*zip(*points), marker="o", label=" ".join(way))

    drawn = {}
    for name, label in (("batch", "windows in a batch"), ("latents", "latents of a window")):
        chosen = [row for row in rows if row.table == name]
        drawn[f"throughput_by_{name}"] = len({getattr(row, name) for row in chosen}) > 1
        if not drawn[f"throughput_by_{name}"]:
            continue
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        lines(chosen, lambda row, name=name: getattr(row, name), lambda row: row.tok_s, axes)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel=label,
            ylabel="tokens/s",
            title=f"{chosen[0].preset} on {about['device']}",
        )
        axes.set_xticks(sorted({getattr(row, name) for row in chosen}), minor=False)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(folder / f"throughput_by_{name}.png", dpi=110)
        plt.close(figure)
    drawn["roofline"] = bool(rows)
    if rows:
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        intensity = [row.flops / row.bytes for row in rows]
        span = [min(intensity) / 2, max(intensity) * 2]
        bandwidth, peak = about["read_bandwidth_tb_s"], about["matmul_tflop_s"]
        grid = [span[0] * (span[1] / span[0]) ** (i / 200) for i in range(201)]
        axes.plot(grid, [min(bandwidth * x, peak) for x in grid], color="black", label="measured ceilings")
        for way in dict.fromkeys((row.implementation, row.weights) for row in rows):
            chosen = [row for row in rows if (row.implementation, row.weights) == way]
            points = [(row.flops / row.bytes, row.flops / row.ms_median / 1e9) for row in chosen]
            axes.scatter(*zip(*points), s=18, label=" ".join(way))
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="operations per byte moved",
            ylabel="TFLOP/s",
            title=f"Roofline, {about['device']}",
        )
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(folder / "roofline.png", dpi=110)
        plt.close(figure)
    return drawn
