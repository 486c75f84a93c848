"""Corpora, tokenizers, token shards, the order of samples, and the loader. numpy only: nothing here imports torch.

prepare.prepare(data)            text -> token shards in a folder (phalanx data prepare)
loader.TokenData(folder, ...)    token shards -> samples
loader.Batches(tokens, ...)      samples -> the micro-batches of each step, read ahead
"""
