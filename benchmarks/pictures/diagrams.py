"""What the pages explain with a picture. Each function returns one as SVG, under the name of its
file.
"""

from __future__ import annotations

from collections.abc import Sequence

from pictures.svg import WIDTH, arrow, box, document, heading, rect, text

_COLOURS = "abcd"


def overview() -> str:
    """One checkpoint, and what it is loaded as."""
    parts = [text(WIDTH / 2, 26, "Train at TP2 x PP2 on four GPUs", "bold", size=16)]
    for rank in range(4):
        parts.append(
            box(
                22 + 106 * rank,
                40,
                98,
                [f"GPU {rank}", f"TP {rank % 2}  PP {rank // 2}"],
                _COLOURS[rank],
            )
        )
        parts.append(arrow(71 + 106 * rank, 98, 71 + 106 * rank, 132))
    parts.append(text(WIDTH / 2, 120, "save", "soft"))
    parts.append(rect(22, 138, 416, 86, radius=8))
    parts.append(text(WIDTH / 2, 162, "one checkpoint", "bold", size=15))
    parts += [rect(60 + 85 * i, 174, 85, 14, _COLOURS[i]) for i in range(4)]
    parts.append(text(WIDTH / 2, 212, "model + optimizer, each byte once, checksums", "soft"))
    targets = [
        ("load", ["DP4", "or any other", "layout"]),
        ("load", ["1 process", "a laptop,", "no GPU"]),
        ("consolidate", ["Hugging Face", "a directory for", "transformers"]),
    ]
    for i, (verb, lines) in enumerate(targets):
        centre = 90 + 140 * i
        parts += [arrow(centre, 228, centre, 276), box(centre - 66, 282, 132, lines)]
        parts.append(text(centre - 8, 256, verb, "soft", "end"))
    return document(
        "A checkpoint saved at TP2 x PP2 is loaded at DP4, in one process, or exported to "
        "Hugging Face",
        366,
        parts,
    )


def walk() -> str:
    """The steps of a save and of a load, side by side."""
    save = [
        ("state dict", "objects, shards, values"),
        ("describe", "keys and regions, no data"),
        ("plan", "one owner for each byte"),
        ("write", "checksums on the way"),
        ("commit", "manifest, marker, rename"),
    ]
    load = [
        ("state dict, filled", "in place, on every rank"),
        ("merge", "factories, common state"),
        ("read", "byte ranges, verified"),
        ("plan", "which ranges of which files"),
        ("manifest", "read once, sent to all"),
    ]
    parts = [heading(14, 28, "Save, on any ranks"), heading(240, 28, "Load, on any others")]
    for i in range(5):
        y = 44 + 76 * i
        parts.append(box(14, y, 206, save[i], "a" if i == 0 else "panel"))
        parts.append(box(240, y, 206, load[i], "a" if i == 0 else "panel"))
        parts += [arrow(117, y + 54, 117, y + 74), arrow(343, y + 76, 343, y + 56)]
    parts.append(
        box(14, 424, 432, ["checkpoint", "visible when complete, plain safetensors files"], "b")
    )
    return document("The steps of a save and of a load", 490, parts)


def grid() -> str:
    """Shards, chunks and regions of one tensor, and a tensor with replicas."""
    parts = [heading(14, 28, "One tensor of 8 x 6, two layouts")]
    for left, title in ((14, "saved at TP4:"), (166, "stored:"), (318, "loaded at TP2:")):
        parts.append(text(left, 58, title, anchor="start"))
    for left, title in ((14, "shards"), (166, "chunks"), (318, "regions")):
        parts.append(text(left, 76, title, "bold", "start"))
    for row, colour in enumerate(_COLOURS):
        y = 86 + 30 * row
        for left in (14, 166, 318):
            parts.append(rect(left, y, 128, 30, colour))
        parts.append(text(78, y + 20, f"rank {row}: {2 * row}, {2 * row + 1}"))
        parts.append(text(230, y + 20, f"rank {row}'s file"))
    parts += [arrow(144, 146, 164, 146), arrow(296, 146, 316, 146)]
    parts.append(
        '<path d="M382 82V212" stroke="var(--ink)" stroke-width="2.5" stroke-dasharray="6 4"/>'
    )
    parts += [text(350, 226, "rank 0"), text(414, 226, "rank 1")]
    parts.append(text(78, 226, "rows of each", "soft"))
    parts.append(heading(14, 268, "A tensor that all four ranks hold: replicas"))
    for rank, colour in enumerate(_COLOURS):
        left = 14 + 86 * rank
        parts += [text(left + 38, 296, f"rank {rank}"), rect(left, 304, 76, 96)]
        parts += [
            rect(left, 304 + 24 * rank, 76, 24, colour),
            text(left + 38, 321 + 24 * rank, "writes"),
        ]
        parts.append(rect(382, 304 + 24 * rank, 64, 24, colour))
    parts += [text(414, 296, "stored"), arrow(352, 352, 378, 352)]
    parts.append(
        text(14, 426, "Each replica writes a part, the same number of bytes.", "soft", "start")
    )
    return document(
        "Shards, chunks and regions of one tensor, and a tensor with replicas", 442, parts
    )


def commit() -> str:
    """What a reader sees while a checkpoint is written."""
    staged = [".step_200.tmp-1f3a/", "  tensors/ ..."]
    marked = [*staged, "  manifest.safetensors", "  metadata.json"]
    panels = [
        ("1. Ranks write", staged, "step_100"),
        ("2. Manifest, then marker", marked, "step_100"),
        ("3. Rename", ["step_200/", *marked[1:]], "step_200"),
    ]
    parts, y = [heading(14, 28, "What a reader sees while step 200 is saved")], 44.0
    for title, files, newest in panels:
        height = 58 + 20 * len(files)
        parts += [rect(14, y, 432, height, radius=8), text(28, y + 24, title, "bold", "start", 15)]
        for i, name in enumerate(["step_100/", *files]):
            hidden = newest == "step_100" and i > 0
            indent = 18 if name.startswith(" ") else 0
            parts.append(
                text(
                    28 + indent,
                    y + 46 + 20 * i,
                    name.strip(),
                    "code soft" if hidden else "code bold",
                    "start",
                )
            )
        parts.append(
            box(
                270,
                y + height / 2 - 27,
                162,
                ["newest:", newest],
                "b" if newest == "step_200" else "a",
            )
        )
        y += height + 26
        parts.append(arrow(WIDTH / 2, y - 24, WIDTH / 2, y - 4))
    parts.pop()
    parts.append(text(14, y, "Grey: hidden until the rename. Readers ignore it.", "soft", "start"))
    return document("What a reader sees while a checkpoint is written", y + 14, parts)


def architecture() -> str:
    """The folders of the package: the kernel, layer by layer, and the wings."""
    layers: Sequence[tuple[str, str, Sequence[str]]] = [
        ("Wings: how programs reach the kernel", "a", ["cli", "_pages", "integrations", "manager"]),
        ("", "a", ["megatron", "dcp", "hf", "torch_dist"]),
        ("Wings: further work", "a", ["tasks", "engines", "_move", "streaming"]),
        ("", "a", ["_compute", "_tools", "_foreign"]),
        ("Kernel: the verbs, and objects", "b", ["_operations", "strategies", "_models"]),
        ("Opening, moving bytes, planning", "c", ["_checkpoint", "_io", "_plan", "_state"]),
        ("Commit, shards, values", "d", ["_commit", "mapping", "_quantization"]),
        ("Bytes on disk, names and shapes", "d", ["_format", "families", "rules"]),
        ("Foundations", "panel", ["_ranks", "_storage", "_geometry", "_base"]),
    ]
    parts = [heading(14, 28, "The kernel and its wings: imports point down")]
    top = 46.0
    for title, colour, names in layers:
        if title:
            parts.append(text(14, top + 12, title, "soft", "start"))
        else:
            top -= 24
        x, slack = 14.0, 432 - 8 * (len(names) - 1) - 9 * sum(map(len, names))
        for name in names:
            width = 9 * len(name) + slack / len(names)
            parts += [
                rect(x, top + 20, width, 32, colour, radius=6),
                text(x + width / 2, top + 41, name, "bold"),
            ]
            x += width + 8
        top += 66
    return document("The kernel and its wings, imports point down", top, parts)


def which_call() -> str:
    """Questions, and the calls that answer them."""
    save = [
        ("one checkpoint, wait for it", "save"),
        ("one checkpoint, train on", "async_save"),
        ("a run with many steps", "CheckpointManager"),
    ]
    load = [
        ("into a model and optimizer", "load"),
        ("into tensors that I shard", "load, ShardedTensor"),
        ("tensors by key, no model", "open"),
        ("the step, arguments", "open"),
    ]
    convert = [
        ("for Hugging Face", "consolidate"),
        ("from Megatron Core, DCP", "distckpt convert"),
        ("to other numbers of files", "reshard"),
    ]
    parts, y = [], 28.0
    for title, rows, colour in (
        ("Save", save, "a"),
        ("Load", load, "b"),
        ("Convert", convert, "c"),
    ):
        parts.append(heading(14, y, title))
        for question, call in rows:
            parts += [text(14, y + 34, question, anchor="start"), arrow(206, y + 29, 232, y + 29)]
            parts += [rect(238, y + 14, 208, 30, colour, radius=6), text(342, y + 34, call, "code")]
            y += 38
        y += 42
    return document("Which call to use for what", y - 20, parts)


DIAGRAMS = {
    f"{draw.__name__}.svg": draw
    for draw in (overview, which_call, walk, grid, commit, architecture)
}
