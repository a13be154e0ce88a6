"""Networks and the table of their names. `rayfed.models.base` creates one."""

MODELS = {
    "mlp": "rayfed.models.mlp:MLP",
    "cnn": "rayfed.models.cnn:CNN",
    "cnn_rotated": "rayfed.models.cnn:RotatedCNN",
    "cnn_domainbed": "rayfed.models.cnn:DomainBedCNN",
    "digits_cnn": "rayfed.models.cnn:DigitsCNN",
    "cct": "rayfed.models.cct:CCT",
    "fasttext": "rayfed.models.fasttext:FastText",
    "har_cnn": "rayfed.models.cnn:HARCNN",
    "unet": "rayfed.models.unet:UNet",
    "resnet18": "rayfed.models.from_torchvision:ResNet18",
    "resnet34": "rayfed.models.from_torchvision:ResNet34",
    "resnet50": "rayfed.models.from_torchvision:ResNet50",
    "vgg11": "rayfed.models.from_torchvision:VGG11",
    "vgg11_mean": "rayfed.models.cnn:VGG11Mean",
    "torchvision": "rayfed.models.from_torchvision:Torchvision",
    "huggingface": "rayfed.models.huggingface:HuggingFace",
}
