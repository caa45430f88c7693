"""Conversions of damaged models, and conversions that are killed.

    python tests/tf_amp/conversion/conversion_faults.py mutate --cases 1000 --seed 1
    python tests/tf_amp/conversion/conversion_faults.py kill --cases 200 --seed 1

Each case runs in a process of its own, forked from one that has imported TensorFlow and run nothing
of it. It ends with an error if a case crashes, hangs, raises what is no `ModelError`, or leaves
anything behind but a whole output.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import converted_models
from google.protobuf.message import Message

import tf_amp
from tf_amp.conversion.convert import convert
from tf_amp.model_files import ModelError

CONFIG = tf_amp.PrecisionConfig(target_dtype="bfloat16", device="CPU")
SOURCES = ("exported", "module", "v1", "frozen.pb", "graph.meta", "image.keras")
SECONDS = 120
"""How long a case may take."""
DONE, REFUSED, WRONG, LEFTOVERS = 0, 1, 2, 3


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Truncates, flips, repeats, swaps or fills some bytes."""
    if not data:
        return b"\xff"
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice((1, 2, 8, 64, 4096)))
    kind = rng.randrange(5)
    if kind == 0:
        return data[:start]
    if kind == 1:
        return data[:start] + bytes(b ^ 1 << rng.randrange(8) for b in data[start:end]) + data[end:]
    if kind == 2:
        return data[:end] + data[start:end] + data[end:]
    if kind == 3:
        return data[:start] + data[end:]
    return data[:start] + rng.randbytes(end - start) + data[end:]


def mutate_message(message: Message, rng: random.Random, depth: int = 0) -> None:
    """Changes one field somewhere inside a message to another legal value."""
    fields = message.ListFields()
    if not fields:
        return
    field, value = rng.choice(fields)
    inner = field.message_type is not None
    repeated = not isinstance(value, (Message, int, float, str, bytes))
    if repeated and hasattr(value, "keys"):
        key = rng.choice(sorted(value.keys()))
        if rng.random() < 0.2:
            del value[key]
        elif isinstance(value[key], Message):
            mutate_message(value[key], rng, depth + 1)
        return
    if repeated:
        number = rng.randrange(len(value))
        if rng.random() < 0.1:
            del value[number]
        elif inner:
            mutate_message(value[number], rng, depth + 1)
        else:
            value[number] = _other(value[number], list(value), rng)
    elif inner:
        if rng.random() < 0.05:
            message.ClearField(field.name)
        else:
            mutate_message(value, rng, depth + 1)
    else:
        setattr(message, field.name, _other(value, [], rng))


def _other(value: object, others: list, rng: random.Random) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return max(0, min(value + rng.choice((-2, -1, 1, 2, 13, 1 << 20)), (1 << 31) - 1))
    if isinstance(value, float):
        return rng.choice((0.0, -1.0, 1e30, float("nan")))
    if others and rng.random() < 0.5:
        return rng.choice(others)
    text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
    new = rng.choice(("", text + "x", text[:-1], "^" + text, text + ":7", "MatMul", "x"))
    return new.encode("latin-1") if isinstance(value, bytes) else new


def damage(path: Path, rng: random.Random) -> None:
    """Damages one file of a model."""
    from tensorflow.core.framework.graph_pb2 import GraphDef
    from tensorflow.core.protobuf.meta_graph_pb2 import MetaGraphDef
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    kinds = {"saved_model.pb": SavedModel, "frozen.pb": GraphDef, "graph.meta": MetaGraphDef}
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    by_name = {file.name: file for file in files}
    file = by_name.get("saved_model.pb", files[0]) if rng.random() < 0.8 else rng.choice(files)
    data = file.read_bytes()
    if file.name in kinds and rng.random() < 0.7:
        message = kinds[file.name].FromString(data)
        for _ in range(rng.choice((1, 1, 3, 20))):
            mutate_message(message, rng)
        file.write_bytes(message.SerializePartialToString())
    else:
        file.write_bytes(mutate_bytes(data, rng))


def attempt(source: Path, out: Path, rng: random.Random) -> int:
    """Converts with random options; returns what came of it."""
    options = {"weights": rng.random() < 0.5, "io": rng.choice(("float32", "target"))}
    try:
        convert(source, out, CONFIG, **options)
        return DONE
    except ModelError as error:
        print(f"{source.name}: {str(error)[:160]}", flush=True)
        return REFUSED
    except BaseException as error:
        print(f"{source.name}: {type(error).__name__}: {error}", flush=True)
        return WRONG


def forked(run: object, seconds: float | None = None, output: Path | None = None) -> int:
    """The outcome of a function in a process of its own, which is killed after some seconds."""
    child = os.fork()
    if not child:
        if output is not None:
            sink = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
        signal.alarm(SECONDS)
        code = WRONG
        try:
            code = run()  # type: ignore[operator]
        finally:
            os._exit(code)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_mutations(folder: Path, cases: int, seed: int) -> list[str]:
    """Converts damaged models; returns what went wrong."""
    faults, seen = [], Counter()
    for case in range(cases):
        rng = random.Random(f"{seed}/{case}")
        name = rng.choice(SOURCES)
        with tempfile.TemporaryDirectory() as room:
            source, log = Path(room, name), Path(room, "log")
            if (folder / name).is_dir():
                shutil.copytree(folder / name, source)
            else:
                shutil.copyfile(folder / name, source)
            damage(source, rng)
            made = Path(room, "made")
            made.mkdir()
            code = forked(lambda: attempt(source, made / "out", rng), output=log)  # noqa: B023
            left = sorted(p.name for p in made.iterdir())
            if left != (["out"] if code == DONE else []):
                code = LEFTOVERS
            seen[code] += 1
            if code not in (DONE, REFUSED):
                faults.append(f"case {case} ({name}): outcome {code}: {log.read_text()[-600:]}")
                print(faults[-1], flush=True)
    print(f"{cases} damaged models: {dict(seen)} (0 converted, 1 refused)")
    return faults


def contents(path: Path) -> dict[str, bytes]:
    """File -> what is in it."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def run_kills(folder: Path, cases: int, seed: int) -> list[str]:
    """Kills conversions at random moments; returns what went wrong."""
    faults, seen = [], Counter()
    with tempfile.TemporaryDirectory() as room:
        source, out = folder / "exported", Path(room, "out")

        def run() -> int:
            convert(source, out, CONFIG, weights=True, force=True)
            return DONE

        start = time.monotonic()
        assert forked(run) == DONE
        duration, whole = time.monotonic() - start, contents(out)
        shutil.rmtree(out)
        rng = random.Random(seed)
        for case in range(cases):
            forked(run, rng.uniform(0, 1.1) * duration, Path(room, "log"))
            found = contents(out) if out.exists() else None
            seen["whole" if found else "absent"] += 1
            if found is not None and found.keys() != whole.keys():
                faults.append(f"case {case}: {sorted(found)}")
            elif found is not None and any(found[k] != whole[k] for k in ("saved_model.pb",)):
                faults.append(f"case {case}: other content")
            if rng.random() < 0.5:
                shutil.rmtree(out, ignore_errors=True)
        assert forked(run) == DONE
        left = sorted({p.name for p in Path(room).iterdir()} - {"out", "log"})
        if left:
            faults.append(f"left behind: {left}")
    print(f"{cases} killed conversions: {dict(seen)}, one takes {duration:.1f} s")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=("mutate", "kill"))
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as room:
        # In a process of its own: a process that has run TensorFlow cannot be forked.
        assert forked(lambda: converted_models.save_all(Path(room)) or DONE) == DONE
        run = run_mutations if arguments.kind == "mutate" else run_kills
        faults = run(Path(room), arguments.cases, arguments.seed)
    print("\n".join(faults) or "no fault")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
