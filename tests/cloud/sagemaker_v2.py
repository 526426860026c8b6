"""Run by version 2 of the SageMaker SDK, in an environment of its own: the request that its estimator makes.

python sagemaker_v2.py < arguments.json
"""

import json
import sys

import boto3
from moto import mock_aws
from sagemaker import Session
from sagemaker.huggingface import HuggingFace

arguments = json.load(sys.stdin)
with mock_aws():
    boto_session = boto3.Session(region_name="us-east-1")
    boto_session.client("s3").create_bucket(Bucket="mine")
    requests = []
    boto_session.events.register(
        "provide-client-params.sagemaker.CreateTrainingJob", lambda params, **_: requests.append(params)
    )
    estimator = HuggingFace(**arguments, sagemaker_session=Session(boto_session, default_bucket="mine"))
    estimator.fit({"dataset": "s3://mine/tweets/rows"}, wait=False, logs=False)
print(json.dumps(requests[0]))
