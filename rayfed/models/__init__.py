"""Networks and the table of their names. `build` creates one."""

MODELS = {
    "mlp": "rayfed.models.mlp:MLP",
    "cnn": "rayfed.models.cnn:CNN",
    "cnn_rotated": "rayfed.models.cnn:RotatedCNN",
    "cnn_domainbed": "rayfed.models.cnn:DomainBedCNN",
    "digits_cnn": "rayfed.models.cnn:DigitsCNN",
    "cct": "rayfed.models.cct:CCT",
    "fasttext": "rayfed.models.fasttext:FastText",
    "har_cnn": "rayfed.models.cnn:HARCNN",
    "resnet18": "rayfed.models.from_torchvision:ResNet18",
    "resnet34": "rayfed.models.from_torchvision:ResNet34",
    "resnet50": "rayfed.models.from_torchvision:ResNet50",
    "mobilenet_v3_small": "rayfed.models.from_torchvision:MobileNetV3Small",
    "efficientnet_b0": "rayfed.models.from_torchvision:EfficientNetB0",
    "densenet121": "rayfed.models.from_torchvision:DenseNet121",
    "shufflenet_v2_x1_0": "rayfed.models.from_torchvision:ShuffleNetV2",
    "vgg11": "rayfed.models.from_torchvision:VGG11",
    "vgg11_mean": "rayfed.models.cnn:VGG11Mean",
    "torchvision": "rayfed.models.from_torchvision:Torchvision",
}
