"""A tracker of one's own: a file of lines such as 10,train/loss,2.31."""

from phalanx import extend


def make(run):
    """Opens the tracker of a run, in a process of its own."""
    from phalanx.trackers.tracker import Tracker

    class CsvTracker(Tracker):
        def __init__(self):
            self.lines = (run.folder / "metrics.csv").open("a")

        def log(self, step, values, time):
            self.lines.writelines(f"{step},{name},{value}\n" for name, value in values.items())

        def flush(self):
            self.lines.flush()

        def close(self, status):
            self.lines.write(f"# {status}\n")
            self.lines.close()

    return CsvTracker()


def register() -> None:
    """The package's entry point."""
    extend.tracker(
        "csv", extend.TrackerEntry("lines of a CSV file", "docs/reference/extending.md", open="csv_tracker:make")
    )
