# The plan of the whole example. No account is asked: the provider is a mock.

mock_provider "aws" {
  override_during = plan

  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }

  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }

  mock_data "aws_ssm_parameter" {
    defaults = { value = "ami-0123456789abcdef0" }
  }

  mock_resource "aws_kms_key" {
    defaults = { arn = "arn:aws:kms:us-east-1:123456789012:key/models" }
  }

  mock_resource "aws_iam_instance_profile" {
    defaults = { arn = "arn:aws:iam::123456789012:instance-profile/machine" }
  }

  mock_resource "aws_iam_policy" {
    defaults = { arn = "arn:aws:iam::123456789012:policy/scaler" }
  }

  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::123456789012:role/machine" }
  }

  mock_resource "aws_cloudwatch_log_group" {
    defaults = { arn = "arn:aws:logs:us-east-1:123456789012:log-group:flow" }
  }

  mock_resource "aws_launch_template" {
    defaults = { id = "lt-0123456789abcdef0", latest_version = 1 }
  }

  mock_resource "aws_ebs_volume" {
    defaults = { id = "vol-0123456789abcdef0" }
  }

  mock_resource "aws_instance" {
    defaults = { private_ip = "10.42.128.10" }
  }

  mock_resource "aws_lb" {
    defaults = { arn = "arn:aws:elasticloadbalancing:us-east-1:123456789012:loadbalancer/app/sllm/1", dns_name = "sllm.elb.amazonaws.com", zone_id = "Z1" }
  }

  mock_resource "aws_lb_target_group" {
    defaults = { arn = "arn:aws:elasticloadbalancing:us-east-1:123456789012:targetgroup/sllm/1" }
  }
}

variables {
  bucket_name     = "acme-models"
  host            = "sllm.example.com"
  certificate_arn = "arn:aws:acm:us-east-1:123456789012:certificate/1"
  zone_id         = "Z2"
  log_bucket      = "acme-logs"
  artifacts = {
    server = { key = "artifacts/sllm-server.tar.gz", sha256 = "0000000000000000000000000000000000000000000000000000000000000000" }
    node   = { key = "artifacts/sllm-node.tar.gz", sha256 = "1111111111111111111111111111111111111111111111111111111111111111" }
  }
}

run "it_fits_together" {
  command = plan

  assert {
    condition     = output.url == "https://sllm.example.com" && strcontains(output.profile, "sllm profile set sllm")
    error_message = "who reads the outputs can call"
  }

  assert {
    condition     = strcontains(module.gpu_pool.node_env, "SLLM_NATS_URL=${module.nats.url}\n")
    error_message = "nodes join this cluster"
  }

  assert {
    condition     = module.gpu_pool.controller_settings.SLLM_NODES_GROUP == "sllm-gpu"
    error_message = "the controller sizes this pool"
  }
}
