"""Accuracy, validity and speed of re-rankers, and the report that holds them side by side.

`evaluation` turns rankings into metrics with intervals, `throughput` times decoders against one another,
`tables` writes `report.json` and shows it. None of them imports RecBole, torch or a language model.
"""
