# From data to text: a few minutes. Lecture: preparation, pre-training, fine-tuning, preferences, text, evaluation, export.
# Collect and clean first: text out of web pages, filters of quality, near-duplicates (needs datatrove: examples/collect.py says how).
# python examples/collect.py dist/site collected && phalanx data prepare data.corpus=text data.path=collected/documents data.tokenizer=bpe
phalanx data prepare examples/main.yaml
phalanx train examples/main.yaml train.steps=100 run.name=course-base --fresh
phalanx generate runs/course-base --prompt "def " --max-new-tokens 60 --temperature 0
phalanx evaluate runs/course-base --limit-mb 0.02
phalanx train examples/fine_tuning.yaml train.steps=40 run.name=fine_tuning --fresh
phalanx train examples/preferences.yaml train.steps=20 run.name=course-preferences --fresh
rm -rf course-base-hf
phalanx export runs/course-base --to hf course-base-hf
# Serve and monitor, each in a terminal of its own.
# phalanx serve runs/course-base
# phalanx watch runs/course-base
phalanx report runs/course-base
