"""Partitions, one file each: which client holds which rows of a dataset. `PARTITIONS` is their registry."""

PARTITIONS = {
    "domains": "rayfed.data.partitions.domains:Domains",
    "domain_mixes": "rayfed.data.partitions.domain_mixes:DomainMixes",
    "iid": "rayfed.data.partitions.iid:Iid",
    "quantity": "rayfed.data.partitions.quantity:Quantity",
    "dirichlet": "rayfed.data.partitions.dirichlet:Dirichlet",
    "lda": "rayfed.data.partitions.lda:Lda",
    "label_k": "rayfed.data.partitions.label_k:LabelK",
    "pathological": "rayfed.data.partitions.pathological:Pathological",
    "classes": "rayfed.data.partitions.classes:Classes",
    "shards": "rayfed.data.partitions.shards:Shards",
    "natural": "rayfed.data.partitions.natural:Natural",
    "file": "rayfed.data.partitions.file:File",
}
