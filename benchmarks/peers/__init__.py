"""The jobs of docs/performance.md on rayfed, a bare PyTorch loop, Flower and pfl-research: `python -m peers`.

`__main__` runs the engines in turn, each in a process and, if it is a library, in a virtual environment of its own.
`jobs` makes the jobs, `job` is the form in which every engine reads them, `<name>_engine` runs a job on one engine, and
`report` checks that all did the same work and prints the comparison.
"""
