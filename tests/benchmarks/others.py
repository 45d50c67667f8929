"""What other packers do with the same lengths. Run by ``packing.py``, by any Python that has them: no rollpack in here.

``python others.py JOB.npz RESULT.json``. The job holds ``kind`` (``pack``, ``balance`` or ``whole``), ``lengths``,
``budget``, ``dp_size`` and ``repeat``. The result is {way: {"version", "seconds", ...}} or {way: {"skipped": reason}}.
"""

import json
import statistics
import sys
import time
from importlib.metadata import version

import numpy as np


def timed(repeat, work):
    seconds, result = [], None
    for _ in range(repeat):
        begin = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds), result


def trl_bfd(job):
    """TRL's best fit decreasing over all rows at once; it moves the tokens too (``pack``: one bit each)."""
    import datasets
    import pyarrow as pa
    from trl import pack_dataset

    datasets.disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(job["lengths"])])
    whole = str(job["kind"]) == "whole"
    values = np.zeros(offsets[-1], np.int32 if whole else bool)
    lists = pa.LargeListArray if whole else pa.ListArray
    ids = lists.from_arrays(pa.array(offsets, pa.int64() if whole else pa.int32()), pa.array(values))
    columns = {"input_ids": ids, "labels": ids} if whole else {"input_ids": ids}
    dataset = datasets.Dataset(pa.table(columns))
    arguments = {"batch_size": len(dataset), "writer_batch_size": 100, "keep_in_memory": True, "load_from_cache_file": False}

    def work():
        return pack_dataset(dataset, int(job["budget"]), "bfd", map_kwargs=arguments)

    seconds, packed = timed(int(job["repeat"]), work)
    return {"version": f"trl {version('trl')}", "seconds": seconds, "bins": len(packed)}


def verl_balance(job):
    """verl: equal counts by workload over ranks, then micro-batches by workload, as many as the fullest rank needs."""
    import torch
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

    lengths, budget, dp_size = job["lengths"], int(job["budget"]), int(job["dp_size"])

    def work():
        costs = calculate_workload(torch.from_numpy(lengths)).tolist()
        ranks = get_seqlen_balanced_partitions(costs, dp_size, equal_size=True)
        per_rank = max(-(-int(lengths[rank].sum()) // budget) for rank in ranks)
        micro_batches = []
        for rank in ranks:
            own = [costs[i] for i in rank]
            parts = get_seqlen_balanced_partitions(own, per_rank, equal_size=False)
            parts.sort(key=lambda part, own=own: -sum(own[i] for i in part))
            micro_batches.append([[rank[i] for i in part] for part in parts])
        return micro_batches

    seconds, ranks = timed(int(job["repeat"]), work)
    return {
        "version": f"verl {version('verl')}",
        "seconds": seconds,
        "schedule": [[list(map(int, m)) for m in r] for r in ranks],
    }


WAYS = {"pack": {"TRL bfd": trl_bfd}, "whole": {"TRL bfd": trl_bfd}, "balance": {"verl": verl_balance}}


def main():
    job = dict(np.load(sys.argv[1]))
    found = {}
    for name, way in WAYS[str(job["kind"])].items():
        try:
            found[name] = way(job)
        except Exception as error:  # noqa: BLE001 - another project's: whatever it is, this way is left out, and the table says why
            found[name] = {"skipped": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    with open(sys.argv[2], "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
