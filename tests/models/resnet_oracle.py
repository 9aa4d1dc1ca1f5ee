"""ResNet-18 as torchvision builds it, in Python's torch: weights and images in, logits and gradients out."""
import json
import sys

import torch
from safetensors.torch import load_file, save_file
from torch import nn


def norm(channels):
    return nn.BatchNorm2d(channels)


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = norm(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet18(nn.Module):
    def __init__(self, classes, channels, small_images):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 3, 1, 1, bias=False) if small_images else \
            nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
        self.bn1 = norm(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, 2, 1)
        widths = [64, 64, 128, 256, 512]
        for i in range(1, 5):
            stride = 1 if i == 1 else 2
            blocks = nn.Sequential(BasicBlock(widths[i - 1], widths[i], stride), BasicBlock(widths[i], widths[i], 1))
            setattr(self, f"layer{i}", blocks)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512, classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


request = json.load(sys.stdin)
torch.set_num_threads(request["threads"])
tensors = load_file(request["weights"])
images, labels = tensors.pop("images"), tensors.pop("labels")
model = ResNet18(request["classes"], images.shape[1], request["small_images"])
model.load_state_dict(tensors, strict=True)
logits = model(images)
torch.nn.functional.cross_entropy(logits, labels).backward()
results = {f"grad.{name}": parameter.grad for name, parameter in model.named_parameters()}
results |= {f"buffer.{name}": buffer for name, buffer in model.named_buffers()}
model.eval()
with torch.no_grad():
    results["evaluated"] = model(images)
save_file({"logits": logits.detach(), **results}, request["results"])
print(json.dumps({"tensors": len(results) + 1}))
