"""Readers that others wrote, asked for the files of a run. Numbers go by float.hex, since JSON has no NaN.

Question, one of: {"events": folder}, {"damaged": path}, {"jsonl": path}, {"csv": path}, {"prometheus": path}.
"""
import csv
import json
import sys


def events(folder: str) -> dict:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    everything = {"scalars": 0, "histograms": 0, "tensors": 0, "compressedHistograms": 1, "images": 1, "audio": 1}
    run = EventAccumulator(folder, size_guidance=everything)
    run.Reload()
    hexes = lambda values: [float(value).hex() for value in values]
    return {
        "scalars": {tag: [[e.step, float(e.value).hex()] for e in run.Scalars(tag)] for tag in run.Tags()["scalars"]},
        "histograms": {
            tag: [{"step": e.step, "summary": hexes([h.min, h.max, h.num, h.sum, h.sum_squares]),
                   "limits": hexes(h.bucket_limit), "counts": hexes(h.bucket)}
                  for e in run.Histograms(tag) for h in [e.histogram_value]]
            for tag in run.Tags()["histograms"]},
    }


def records(path: str) -> int:
    """Records up to the first that TensorBoard refuses."""
    from tensorboard.compat.tensorflow_stub import errors
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
    reader, count = PyRecordReader_New(path), 0
    try:
        while True:
            reader.GetNext()
            count += 1
    except errors.DataLossError:
        return -1 - count
    except errors.OutOfRangeError:
        return count


def damaged(path: str) -> dict:
    """How the file is read with each of its bits flipped: the ones that nobody notices."""
    whole = open(path, "rb").read()
    unnoticed = []
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        with open(path + ".flipped", "wb") as file:
            file.write(flipped)
        if records(path + ".flipped") >= 0:
            unnoticed.append(bit)
    return {"whole": records(path), "bits": 8 * len(whole), "unnoticed": unnoticed}


def refuse(constant: str):
    raise ValueError(f"{constant} is not JSON")


def unique(pairs: list) -> dict:
    if len(dict(pairs)) != len(pairs):
        raise ValueError(f"a key stands twice: {pairs}")
    return dict(pairs)


def jsonl(path: str) -> list:
    with open(path, "rb") as file:
        lines = file.read().decode("utf-8").split("\n")
    assert lines.pop() == "", "the last line has no end"
    return [json.loads(line, parse_constant=refuse, object_pairs_hook=unique) for line in lines]


def csv_rows(path: str) -> list:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, strict=True))


def prometheus(path: str) -> list:
    from prometheus_client.parser import text_string_to_metric_families
    with open(path, encoding="utf-8") as file:
        families = list(text_string_to_metric_families(file.read()))
    return [{"name": family.name, "type": family.type, "help": family.documentation,
             "samples": [[sample.name, sample.labels, float(sample.value).hex()] for sample in family.samples]}
            for family in families]


((what, where),) = json.load(sys.stdin).items()
json.dump({"events": events, "damaged": damaged, "jsonl": jsonl, "csv": csv_rows,
           "prometheus": prometheus}[what](where), sys.stdout)
