"""Partitions: which client holds which rows of a dataset. `PARTITIONS` is their registry."""

PARTITIONS = {
    "domains": "rayfed.data.partitions.domains:Domains",
    "domain_mixes": "rayfed.data.partitions.domain_mixes:DomainMixes",
    "iid": "rayfed.data.partitions.random_shares:Iid",
    "quantity": "rayfed.data.partitions.random_shares:Quantity",
    "dirichlet": "rayfed.data.partitions.label_skew:Dirichlet",
    "lda": "rayfed.data.partitions.label_skew:Lda",
    "label_k": "rayfed.data.partitions.label_skew:LabelK",
    "pathological": "rayfed.data.partitions.label_skew:Pathological",
    "classes": "rayfed.data.partitions.classes:Classes",
    "shards": "rayfed.data.partitions.label_skew:Shards",
    "natural": "rayfed.data.partitions.natural:Natural",
    "file": "rayfed.data.partitions.file:File",
}
