"""Partitions: which client holds which rows of a dataset. `PARTITIONS` is their registry."""

PARTITIONS = {
    "domains": "rayfed.data.partitions.domains:Domains",
    "domain_mixes": "rayfed.data.partitions.domains:DomainMixes",
    "iid": "rayfed.data.partitions.pooled:Iid",
    "quantity": "rayfed.data.partitions.pooled:Quantity",
    "dirichlet": "rayfed.data.partitions.pooled:Dirichlet",
    "lda": "rayfed.data.partitions.pooled:Lda",
    "label_k": "rayfed.data.partitions.pooled:LabelK",
    "power_law": "rayfed.data.partitions.pooled:PowerLaw",
    "pathological": "rayfed.data.partitions.pooled:Pathological",
    "classes": "rayfed.data.partitions.domains:Classes",
    "shards": "rayfed.data.partitions.pooled:Shards",
    "natural": "rayfed.data.partitions.domains:Natural",
    "file": "rayfed.data.partitions.file:File",
}
