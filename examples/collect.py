"""Turns a folder of web pages into documents for pre-training, as FineWeb was made (Penedo et al. 2024, section 3):
text out of HTML, filters of quality, near-duplicates removed by MinHash. It runs on datatrove, in as many processes as
there are cores; what a step has finished is not done again.

    pip install "datatrove[io,processing]" spacy lxml_html_clean
    python examples/collect.py FOLDER_OF_PAGES collected
    phalanx data prepare data.corpus=text data.path=collected/documents data.tokenizer=bpe

The same steps read Common Crawl with WarcReader, and run under Slurm with SlurmPipelineExecutor. FineWeb also filters
by address, language (a fastText model of 130 MB) and C4's rules: URLFilter, LanguageFilter, C4QualityFilter.
"""

import os
import sys
from pathlib import Path

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.extractors import Trafilatura
from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

TASKS = os.cpu_count() or 1
MINHASH = MinhashConfig(num_buckets=14, hashes_per_bucket=8, n_grams=5)  # FineWeb's: 75 % similar pages are found


class Pages(PipelineStep):
    """Reads the .html files of a folder, each task its own."""

    name = "Pages"
    type = "READER"

    def __init__(self, folder: str):
        super().__init__()
        self.folder = folder

    def run(self, data=None, rank=0, world_size=1):
        for path in sorted(Path(self.folder).rglob("*.html"))[rank::world_size]:
            name = path.relative_to(self.folder).as_posix()
            yield Document(path.read_text("utf-8", "replace"), id=name, metadata={"url": name})


def main(pages: str, out: str) -> None:
    def step(name, *pipeline, tasks=TASKS, after=None):
        return LocalPipelineExecutor([*pipeline], tasks=tasks, logging_dir=f"{out}/logs/{name}", depends=after)

    def rejected(name):
        return JsonlWriter(f"{out}/rejected/{name}", compression=None)

    filtered = step(
        "filter",
        Pages(pages),
        Trafilatura(favour_precision=True, timeout=5),
        GopherRepetitionFilter(exclusion_writer=rejected("repetition")),
        GopherQualityFilter(exclusion_writer=rejected("quality")),
        FineWebQualityFilter(exclusion_writer=rejected("fineweb")),
        JsonlWriter(f"{out}/filtered", compression=None),
    )
    # Near-duplicates: a signature per document, buckets of equal parts of signatures, clusters, one document of each.
    reader = JsonlReader(f"{out}/filtered")
    signed = step("sign", reader, MinhashDedupSignature(f"{out}/minhash/signatures", config=MINHASH), after=filtered)
    buckets = MinhashDedupBuckets(f"{out}/minhash/signatures", f"{out}/minhash/buckets", config=MINHASH)
    matched = step("match", buckets, tasks=MINHASH.num_buckets, after=signed)
    clusters = MinhashDedupCluster(f"{out}/minhash/buckets", f"{out}/minhash/removed", config=MINHASH)
    clustered = step("cluster", clusters, tasks=1, after=matched)
    kept = MinhashDedupFilter(f"{out}/minhash/removed", exclusion_writer=rejected("duplicates"))
    written = JsonlWriter(f"{out}/documents", compression=None)
    step("write", reader, kept, PIIFormatter(), written, after=clustered).run()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/collect.py FOLDER_OF_PAGES OUT")
    main(*sys.argv[1:])
