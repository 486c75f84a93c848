"""Configurations of other training frameworks, read as jobs: `phalanx predict|plan|verify --from FILE`.

A format is a table of names, a small module, and a line in `read.py`:

1. `NAME.yaml` beside this file says what each of their names is. `fields` has the plain ones (`their_name: layout.tp`,
   or `their_name: {path: layout.tp, values: {theirs: ours}, how: a remark}`; a word of theirs may set several fields,
   `theirs: {optimizer.name: adamw, optimizer.state: 8bit}`), `rules` those that only the module can read. `nothing` and
   `cost` list the names without a counterpart under the reason: those that change no predicted figure, and those whose
   effect on time or memory is not predicted; `assumed` those that the prediction assumes to be on. `source` is the page
   that documents them. A name may end with `*`. With `extends: OTHER` a table begins with another one. A name of a file
   that the table lacks is `unknown`.
2. `NAME.py` has a `ForeignFormat`. `recognises(source)` looks at the content. `parse(source)` returns a `Stated` for
   each value with its line (`yaml_values` in frame.py does it for YAML and JSON); nothing is executed, and a value that
   follows from an expression is `Unresolved`. `finish(fields)` sets what a table cannot say, after the table has been
   applied: `fields.take("their_name", int, 1)` reads a value, `fields.set(path, value, names, how)` sets a field of the
   job, `fields.leave(name, why, affects=True)` lists one without a counterpart. It also sets `fields.framework`, one of
   cost/frameworks.yaml. `written(theirs, layout)` is the inverse for names with a rule, for `write_back`; plain ones of
   `layout.` fields are inverted by the table.
3. Its `FORMAT` is added to `FORMATS` in read.py, its tests to tests/foreign/, its example to tests/fuzz/loaders.py.

Programs whose files are only named, with what to write instead, stand in unread.yaml.
"""
