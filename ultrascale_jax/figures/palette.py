"""Colours of the figures; the same part has the same colour in all of them."""

from collections.abc import Sequence

WHOLE = "all parts"
"""Name of the part of a bar that is not divided."""
LOOP = "loop"
"""Kind of an event that represents many iterations, as `LOOP` of plan/compiled/timeline.py."""
VARIABLE = ("activation", "exposed", "bubble", "transfer", "stall", "waiting")
"""Words in the names of parts that a better configuration reduces: on top of a stack, in warm colours."""

# Colours of Paul Tol's schemes "bright", "light" and "muted" (personal.sron.nl/~pault): colour-blind readers
# distinguish them.
COOL = ("#4477AA", "#66CCEE", "#44AA99", "#228833", "#99DDFF", "#BBCC33", "#BBBBBB", "#77AADD")
WARM = ("#EE8866", "#AA3377", "#CCBB44", "#EE6677", "#FFAABB", "#999933", "#CC6677", "#DDCC77")
OWN = {
    "master parameters": "#4477AA",
    "compute parameters": "#77AADD",
    "optimizer state": "#66CCEE",
    "gradients": "#228833",
    "accumulation buffer": "#44AA99",
    "batch": "#999933",
    "communication buffers": "#BBCC33",
    "workspace": "#BBBBBB",
    "cuDNN workspace": "#DDDDDD",
    "activations: layer inputs": "#EE8866",
    "activations: attention": "#CCBB44",
    "activations: mlp": "#AA3377",
    "activations: norms": "#EE6677",
    "activations: logits": "#FFAABB",
    WHOLE: "#888888",
}
"""Colours of parts that many figures show, by the names in plan/formulas/memory.py."""
KINDS = {
    "gemm": "#4477AA",
    "attention": "#AA3377",
    "other": "#DDCC77",
    "copy": "#999933",
    "all-gather": "#EE8866",
    "reduce-scatter": "#228833",
    "all-reduce": "#EE6677",
    "all-to-all": "#66CCEE",
    "collective-permute": "#44AA99",
    LOOP: "#CCCCCC",
}
"""Colours of operations, by the names in plan/compiled/timeline.py."""
OPERATIONS = {"F": "#4477AA", "B": "#44AA99", "W": "#EE8866"}
"""Colours of a pipeline's operations, by the names in parallel/pipeline/schedules.py."""
SERIES = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#AA3377", "#66CCEE", "#888888")
MARKERS = "osD^vPX"
INK, PAPER = "#24292e", "#fefefe"
"""Colours of text and background."""
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.15,
    "grid.color": INK,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "legend.frameon": False,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    ),
}


def is_variable(part: str) -> bool:
    """Return whether the part belongs on top of a stack."""
    return any(word in part.lower() for word in VARIABLE)


def colours(parts: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return colour and hatch of every part: its own, or the next free one of the warm or of the cool tones."""
    chosen = {part: (OWN[part], "") for part in parts if part in OWN}
    taken = {colour for colour, _ in chosen.values()}
    free = {family: [c for c in family if c not in taken] for family in (COOL, WARM)}
    used = {COOL: 0, WARM: 0}
    for part in parts:
        if part not in chosen:
            family = WARM if is_variable(part) else COOL
            turn, place = divmod(used[family], len(free[family]))
            chosen[part] = free[family][place], ("", "///", "...")[turn % 3]
            used[family] += 1
    return {part: chosen[part] for part in parts}


def kind_colours(kinds: Sequence[str]) -> dict[str, str]:
    """Return the colour of every kind of operation of a timeline."""
    free = [c for c in dict.fromkeys((*SERIES, *WARM)) if c not in KINDS.values()]
    unnamed = [kind for kind in kinds if kind not in KINDS]
    named = {kind: free[n % len(free)] for n, kind in enumerate(unnamed)}
    return {kind: KINDS.get(kind) or named[kind] for kind in kinds}


def shade(colour: str, chunk: int, chunks: int) -> str:
    """Return the colour of a rank's stage `chunk` of `chunks`: later ones lighter, all light enough for black text."""
    white = 0.25 + 0.5 * chunk / max(1, chunks - 1)
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)
